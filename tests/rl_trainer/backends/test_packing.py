"""Packing gives the same results as padding; token-bounded passes; learning rate schedules."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from policy_weights import weights_of
from relative import apart, near

from rl_protocol import BatchData, BatchError, ragged
from rl_trainer import ActorConfig, CriticConfig, OptimConfig
from rl_trainer.backends.forward_passes import ForwardPasses
from rl_trainer.backends.packing import PackedLayout, TokenNumbers, packed_attention
from rl_trainer.backends.token_batch import token_batch
from rl_trainer.backends.torch_critic import TorchCriticBackend
from rl_trainer.backends.torch_policy import PolicyOptions, TorchPolicyBackend
from rl_trainer.backends.world import World

pytestmark = pytest.mark.numeric


def config(**how):
    return ActorConfig(optim=OptimConfig(lr=1e-3), ppo_mini_batch_size=8, use_kl_loss=True, entropy_coeff=0.01, **how)


def test_packed_equals_padded(model_path, training_batch):
    padded = TorchPolicyBackend(model_path, config(), options=PolicyOptions(sum_pi_squared=True))
    packed = TorchPolicyBackend(
        model_path, config(use_remove_padding=True, ppo_max_token_len=24), options=PolicyOptions(sum_pi_squared=True)
    )
    data = training_batch(TorchPolicyBackend(model_path, None), rows=8)
    first = weights_of(padded)
    for _ in range(3):
        one, other = padded.update(data, temperature=0.8), packed.update(data, temperature=0.8)
        assert one == near(other, 1e-5, data)
    # relative to what the updates change, as a vector: Adam turns the rounding of a gradient near 0
    # into a part of a step
    assert torch.dist(weights_of(padded), weights_of(packed)) < 1e-2 * torch.dist(weights_of(padded), first)
    one, other = (policy.compute_log_probs(data, temperature=0.8) for policy in (padded, packed))
    for name in ("log_probs", "entropy", "sum_pi_squared"):
        assert one.ragged(name).offsets.tolist() == other.ragged(name).offsets.tolist()
        assert apart(one.ragged(name).values, other.ragged(name).values) < 1e-5


def test_a_packed_critic_equals_a_padded_one(model_path, training_batch):
    data = training_batch(TorchPolicyBackend(model_path, None), rows=8)
    columns = {"values": data.ragged("ref_log_prob"), "returns": data.ragged("advantages")}
    data = BatchData({**data.columns, **columns})
    how = {"optim": OptimConfig(lr=1e-3), "ppo_mini_batch_size": 8}
    padded = TorchCriticBackend(model_path, CriticConfig(**how), rollout_n=1, seed=0)
    packed = TorchCriticBackend(model_path, CriticConfig(**how, use_remove_padding=True), rollout_n=1, seed=0)
    for _ in range(3):
        assert padded.update(data) == near(packed.update(data), 1e-5, data)
    one, other = (critic.compute_values(data).ragged("values").values for critic in (padded, packed))
    assert np.abs(one).max() > 0
    assert apart(one, other) < 1e-4  # Adam turns rounding into parts of steps


def test_the_layout_of_packed_tokens_by_hand():
    data = BatchData({"prompts": ragged([[5], [6, 7]], "int64"), "responses": ragged([[8, 9], [4]], "int64")})
    packed = token_batch(data, 0, packed=True)
    assert packed.inputs["input_ids"].tolist() == [[5, 8, 6, 7]]  # nothing follows the last tokens, 9 and 4
    assert packed.inputs["position_ids"].tolist() == [[0, 1, 0, 1]]
    layout = packed.inputs["layout"]
    assert (layout.blocks, layout.source.tolist()) == (((2, 2),), [0, 1, 2, 3])
    assert packed.position.tolist() == [0, 1, 3]
    assert (packed.row.tolist(), packed.line.tolist(), packed.targets.tolist()) == ([0, 0, 1], [0, 0, 0], [8, 9, 4])


def test_rows_share_the_tokens_of_equal_prompts():
    prompts, responses = [[5, 6], [7], [5, 6], [5]], [[1, 2], [4, 4, 4], [3], []]
    packed = token_batch(
        BatchData({"prompts": ragged(prompts, "int64"), "responses": ragged(responses, "int64")}), 0, packed=True
    )
    assert packed.inputs["input_ids"].tolist() == [[5, 6, 1, 7, 4, 4, 5]]
    assert packed.inputs["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 0]]
    layout, padding = packed.inputs["layout"], 0
    source = [[0, 1, 2], [3, 4, 5], [0, 1, padding], [6, padding, padding]]
    assert layout.blocks == ((4, 3),)
    assert layout.source.view(4, 3).tolist() == source
    assert layout.source[layout.place].tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert packed.position.tolist() == [1, 2, 3, 4, 5, 1]  # both 1 and 3 follow token 1, the 6 of the first row
    assert (packed.row.tolist(), packed.targets.tolist()) == ([0, 0, 1, 1, 1, 2], [1, 2, 4, 4, 4, 3])


def test_copies_of_a_token_make_the_number_of_tokens_a_multiple():
    prompts, responses = [[5, 6], [7], [5, 6]], [[1, 2], [4, 4, 4], [3]]
    data = BatchData({"prompts": ragged(prompts, "int64"), "responses": ragged(responses, "int64")})
    plain, filled = token_batch(data, 0, packed=True), token_batch(data, 0, packed=True, multiple=9)
    assert filled.inputs["input_ids"].tolist() == [[*plain.inputs["input_ids"][0].tolist(), 4, 4, 4]]
    assert filled.inputs["position_ids"].tolist() == [[*plain.inputs["position_ids"][0].tolist(), 2, 2, 2]]
    one, other = plain.inputs["layout"], filled.inputs["layout"]
    assert len(other.place) == len(other.source)  # as many as with padding, but not in their order
    assert not other.joined
    assert (one.blocks, one.source.tolist()) == (other.blocks, other.source.tolist())
    assert plain.position.tolist() == filled.position.tolist()


def test_sequences_that_need_no_copies_in_attention_get_no_copies_of_a_token():
    data = BatchData({"prompts": ragged([[5], [6]], "int64"), "responses": ragged([[8] * 2] * 2, "int64")})
    packed = token_batch(data, 0, packed=True, multiple=16)
    assert packed.inputs["input_ids"].tolist() == [[5, 8, 6, 8]]
    assert packed.inputs["layout"].joined


def test_few_equal_prompts_are_not_shared():
    data = BatchData({"prompts": ragged([[5], [5], [6]], "int64"), "responses": ragged([[8] * 9] * 3, "int64")})
    packed = token_batch(data, 0, packed=True)
    assert packed.inputs["layout"].source.tolist() == list(range(27))


def test_shared_prompts_give_the_gradients_of_separate_ones(model_path, training_batch):
    data = training_batch(TorchPolicyBackend(model_path, None), rows=8)
    prompts = data.ragged("prompts")
    rows = [prompts.values[a:b].tolist() for a, b in pairwise(prompts.offsets)]
    alike = BatchData({**data.columns, "prompts": ragged([rows[i // 4] for i in range(8)], "int64")})
    norms: list[float] = []
    for how in ({}, {"use_remove_padding": True}, {"use_remove_padding": True, "ppo_micro_batch_size": 1}):
        policy = TorchPolicyBackend(model_path, config(**how))
        norms.append(policy.update(alike, temperature=0.8)["actor/grad_norm"])
    tokens = token_batch(alike, 0, packed=True)
    assert tokens.inputs["input_ids"].shape[1] < sum(map(len, rows[:2] * 4))
    assert norms[1:] == pytest.approx(norms[:1] * 2, rel=1e-5)


def laid_out(lengths):
    """The layout of sequences that share nothing."""
    lengths = np.asarray(lengths)
    return PackedLayout.of(TokenNumbers.of(lengths, np.arange(len(lengths)), np.zeros_like(lengths)))


def test_attention_computes_sequences_of_similar_lengths_together():
    layout = laid_out([90, 600, 30, 100])
    assert layout.blocks == ((1, 600), (3, 100))  # 30 is not similar to 100, but a block has 512 places
    first, second, third, fourth = range(90), range(90, 690), range(690, 720), range(720, 820)
    padding = 0
    assert layout.source.tolist() == [*second, *fourth, *first, *[padding] * 10, *third, *[padding] * 70]
    assert layout.source[layout.place].tolist() == list(range(820))
    assert layout.place[0] == 700  # a real place of token 0, and no padding


@pytest.mark.parametrize(
    "starts",
    [[0, 3, 4, 7], [0, 3, 6], [0, 5], [0, 520, 524, 900, 903]],
    ids=["ragged", "equal", "one", "blocks"],
)
def test_attention_stays_within_each_sequence(starts):
    torch.manual_seed(0)
    tokens, sequences = starts[-1], list(pairwise(starts))
    q, k, v = torch.randn(1, 4, tokens, 8), torch.randn(1, 2, tokens, 8), torch.randn(1, 2, tokens, 8)
    out, none = packed_attention(torch.nn.Identity(), q, k, v, None, 0.3, layout=laid_out(np.diff(starts)))
    assert none is None
    for start, stop in sequences:
        for head in range(4):
            own = (q[0, head, start:stop] @ k[0, head // 2, start:stop].T) * 0.3
            own = own.masked_fill(torch.ones_like(own).triu(1).bool(), -math.inf)
            want = torch.softmax(own, -1) @ v[0, head // 2, start:stop]
            assert_equal_to_rounding(out[0, start:stop, head], want)


@pytest.mark.parametrize("starts", [[0, 3, 4, 10], [0, 6, 12]], ids=["ragged", "equal"])
def test_a_sliding_window_ends_what_a_token_attends_to(starts):
    torch.manual_seed(0)
    tokens, window, sequences = starts[-1], 2, list(pairwise(starts))
    q, k, v = torch.randn(1, 4, tokens, 8), torch.randn(1, 2, tokens, 8), torch.randn(1, 2, tokens, 8)
    out, _ = packed_attention(
        torch.nn.Identity(),
        *(q, k, v),
        None,
        0.3,
        layout=laid_out(np.diff(starts)),
        sliding_window=window,
    )
    for start, stop in sequences:
        for place in range(start, stop):
            seen = slice(max(start, place - window + 1), place + 1)
            for head in range(4):
                want = torch.softmax(0.3 * k[0, head // 2, seen] @ q[0, head, place], 0) @ v[0, head // 2, seen]
                assert_equal_to_rounding(out[0, place, head], want)


class OnGpu(torch.Tensor):
    """A tensor of the CPU that says it is on a GPU."""

    is_cuda, is_cpu = True, False


class OfTorch(torch.Tensor):
    """A tensor of the CPU whose attention is that of torch for the CPU."""

    is_cpu = False


@pytest.mark.parametrize(
    ("dtype", "window", "grouped"),
    [(torch.bfloat16, None, True), (torch.float32, None, False), (torch.bfloat16, 2, False)],
    ids=["flash", "float32", "window"],
)
def test_on_a_gpu_heads_are_grouped_only_where_flash_attention_computes(monkeypatch, dtype, window, grouped):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, 12, 8, dtype=dtype) for heads in (4, 2, 2))
    attend, asked = torch.nn.functional.scaled_dot_product_attention, []

    def noting(query, key, value, **options):
        asked.append((key.shape[1], value.shape[1], options["enable_gqa"]))
        return attend(query, key, value, **options)

    def computed(*tensors):
        settings = {"layout": laid_out([6, 6]), "sliding_window": window}
        return (
            packed_attention(torch.nn.Identity(), *tensors, None, 0.3, **settings)[0].float().as_subclass(torch.Tensor)
        )

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noting)
    on_gpu = computed(*(tensor.as_subclass(OnGpu) for tensor in (q, k, v)))
    assert asked == [(2, 2, True) if grouped else (4, 4, False)]
    assert_equal_to_rounding(on_gpu, computed(*(tensor.as_subclass(OfTorch) for tensor in (q, k, v))))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 100], ids=["causal", "window"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_on_a_gpu_keeps_no_matrix_of_all_pairs_of_each_head(dtype, window):
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    tokens, heads = 8192, 16
    q, k, v = (torch.randn(1, n, tokens, 64, dtype=dtype, device="cuda", requires_grad=True) for n in (heads, 4, 4))
    layout = laid_out([tokens]).to(q.device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, _ = packed_attention(torch.nn.Identity(), q, k, v, None, layout=layout, sliding_window=window)
    out.sum().backward()
    assert torch.cuda.max_memory_allocated() - before < heads * tokens**2 * dtype.itemsize / 2


def assert_equal_to_rounding(got, want):
    """The difference of two float32 sums is at most 1e-5 of the length of the vector."""
    assert (got - want).norm() <= 1e-5 * want.norm()


def test_passes_hold_every_row_once_within_their_bound():
    lengths = np.array([5, 9, 2, 7, 7, 1, 3])
    rows = [6, 1, 3, 0, 5]
    by_tokens = ForwardPasses(world=World(), max_tokens=10).cut(lengths, rows)
    assert sorted(row for part in by_tokens for row in part) == sorted(rows)
    assert all(lengths[part].sum() <= 10 for part in by_tokens)
    assert ForwardPasses(world=World(), max_rows=2).cut(lengths, rows) == [[6, 1], [3, 0], [5]]
    assert ForwardPasses(world=World()).cut(lengths, rows) == [rows]
    assert ForwardPasses(world=World()).cut(lengths, []) == []
    with pytest.raises(BatchError, match="9 tokens, more than the 8"):
        ForwardPasses(world=World(), max_tokens=8).cut(lengths, rows)


def test_passes_without_bounds_have_at_most_16384_tokens_unless_a_row_is_longer():
    lengths = np.array([6000, 9000, 7000, 20000, 300])
    packed = ForwardPasses(world=World())
    assert packed.cut(lengths, [0, 1, 4]) == [[0, 1, 4]]  # 15,300 tokens
    parts = packed.cut(lengths, [4, 0, 1, 2])  # 22,300
    assert sorted(row for part in parts for row in part) == [0, 1, 2, 4]
    assert len(parts) == 2
    assert all(lengths[part].sum() <= 16384 for part in parts)
    assert sorted(map(sorted, packed.cut(lengths, [2, 3, 1]))) == [[1, 2], [3]]  # the row of 20,000 is alone
    padded = ForwardPasses(world=World(), padded=True)
    assert padded.cut(lengths, [0, 4, 2]) == [[0, 4], [2]]  # 2 x 7,000 with padding; 3 do not fit
    assert padded.cut(lengths, [3, 4]) == [[3], [4]]
