"""Causal attention in Megatron-Core's layout, against softmax by hand, and the memory it keeps."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("megatron.core")


def inputs(tokens, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(tokens, 2, heads, 8, dtype=dtype, generator=generator).requires_grad_() for heads in (4, 2, 2)]


def by_hand(query, key, value, scale):
    key, value = (each.repeat_interleave(2, dim=2) for each in (key, value))
    scores = torch.einsum("sbhd,tbhd->bhst", query, key) * scale
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(later, -torch.inf).softmax(-1)
    return torch.einsum("bhst,tbhd->sbhd", weights, value).flatten(2)


@pytest.mark.parametrize("scale", [None, 0.5])
def test_it_is_softmax_over_the_tokens_up_to_each_one(scale):
    from rl_megatron_peft.backend.model.causal_attention import CausalAttention

    given, attention = inputs(5), CausalAttention(softmax_scale=scale, layer_number=1)
    mine = attention(*given, None, attn_mask_type=None, attention_bias=None, packed_seq_params=None)
    hand = by_hand(*given, 8**-0.5 if scale is None else scale)
    assert mine.shape == (5, 2, 32)
    gradients = [torch.autograd.grad(out.square().sum(), given) for out in (mine, hand)]
    for got, want in zip((mine, *gradients[0]), (hand, *gradients[1]), strict=True):
        assert (got - want).norm() < 1e-12 * want.norm()


def test_it_keeps_no_matrix_of_all_pairs_of_tokens_for_the_backward_pass():
    from rl_megatron_peft.backend.model.causal_attention import CausalAttention

    def kept(tokens):
        sizes = dict[int, int]()

        def keep(tensor):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = CausalAttention(softmax_scale=None)(*inputs(tokens, torch.float32), None)
        assert out.requires_grad
        return sum(sizes.values())

    assert kept(512) == 8 * kept(64)


def test_the_layers_of_a_model_have_it(models):
    from rl_megatron_peft.backend.model.causal_attention import CausalAttention
    from rl_megatron_peft.backend.model.gpt import _layers
    from rl_megatron_peft.backend.parallel import Ranks
    from rl_megatron_peft.base_model.layout import Layout
    from rl_megatron_peft.base_model.model_shape import ModelShape

    ranks = Ranks(layout=Layout(), tensor=0, pipeline=0, data=0, replicas=1, device=torch.device("cpu"))
    layer, *_ = _layers(ModelShape.read(models / "llama"), ranks).layer_specs
    assert layer.submodules.self_attention.submodules.core_attention is CausalAttention


class OnGpu(torch.Tensor):
    """A tensor of the CPU that says it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize(("dtype", "grouped"), [(torch.bfloat16, True), (torch.float32, False)])
def test_on_a_gpu_heads_are_grouped_only_where_flash_attention_computes(monkeypatch, dtype, grouped):
    from rl_megatron_peft.backend.model.causal_attention import CausalAttention

    attend, asked = torch.nn.functional.scaled_dot_product_attention, []

    def noting(query, key, value, **options):
        asked.append((key.shape[1], value.shape[1], options["enable_gqa"]))
        return attend(query, key, value, **options)

    given, attention = [each.detach() for each in inputs(5, dtype)], CausalAttention(softmax_scale=None)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noting)
    on_gpu = attention(*(each.as_subclass(OnGpu) for each in given), None).float()
    assert asked == [(2, 2, True) if grouped else (4, 4, False)]
    want = attention(*given, None).float()
    assert (on_gpu - want).norm() <= 1e-5 * want.norm()
