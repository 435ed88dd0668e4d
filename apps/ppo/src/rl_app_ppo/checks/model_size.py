"""Sizes of a model from its configuration alone, without weights. Imports torch, transformers."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.autograd.function import FunctionCtx
from transformers import AttentionInterface, AutoConfig
from transformers.integrations.moe import ExpertsInterface

from rl_app_ppo.checks.role_memory import ModelSize, TowerSize
from rl_app_ppo.demo.model import model_config
from rl_app_ppo.demo.settings import ModelSettings
from rl_trainer.backends.experts.adapters import adapted_experts
from rl_trainer.backends.loading import layer_names, model_class, readable
from rl_trainer.backends.output_head import OutputHead
from rl_trainer.config.lora import LoraConfig
from rl_trainer.data.images import FAMILIES

_SHAPES = "rl_app_ppo_shapes"
"""Name for `attn_implementation` and `experts_implementation`."""
_OF_EXPERTS = ".experts."
"""In the names of their weights."""
_DTYPES = {2: torch.bfloat16, 4: torch.float32}


def model_size(path: Path | None, lora: LoraConfig) -> ModelSize:
    """The sizes of the model in a folder; None: of the demo model.

    Raises:
        ConfigError: transformers can't make a language model from its configuration.
    """
    with readable(f"model.path={str(path)!r} can't be loaded as a transformers causal language model"):
        config: Any = (
            model_config(ModelSettings())
            if path is None
            else AutoConfig.from_pretrained(str(path), local_files_only=True)
        )
        model = _shapes(config, torch.float32)
    weights = sum(parameter.numel() for parameter in model.parameters())
    linear = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    covered = [module for name, module in linear.items() if lora.rank and lora.covers(name)]
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    expert_adapters = sum(
        lora.rank * math.prod((shapes[name][0], sum(shapes[name][1:])))
        for name in (adapted_experts(shapes.items(), lora) if lora.rank else ())
    )
    adapters = expert_adapters + sum(lora.rank * (module.in_features + module.out_features) for module in covered)
    output, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    text, decoder = config.get_text_config(), model.get_decoder()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return ModelSize(
        weights=weights,
        trained=adapters or weights,
        kv_token=2 * text.num_hidden_layers * heads * head,
        layers=text.num_hidden_layers,
        outside=weights - _of_blocks(model, model),
        blocks=_of_blocks(model, decoder),
        head=0 if output is None or output.weight is embeddings.weight else output.weight.numel(),
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        chunked=not any(module is output for module in covered) and OutputHead.of(model) is not None,
        activations=lambda tokens, element: _kept_of_tokens(_shapes(config, _DTYPES[element]), tokens),
        expert_adapters=expert_adapters,
        experts=sum(weight.numel() for name, weight in model.named_parameters() if _OF_EXPERTS in name),
        vision=_tower(config, model.model.visual) if _sees(config) else None,
    )


def _sees(config: Any) -> bool:
    """Whether the model reads images."""
    return config.model_type in FAMILIES


def _tower(config: Any, tower: Any) -> TowerSize:
    """The sizes of a vision tower."""
    vision = config.vision_config
    return TowerSize(
        weights=sum(weight.numel() for weight in tower.parameters()),
        layers=len(tower.blocks),
        hidden=tower.patch_embed.embed_dim,
        pieces=vision.spatial_merge_size**2,
        numbers=_numbers(vision),
        activations=lambda patches, element: _kept_of_images(_shapes(config, _DTYPES[element]), patches),
    )


def _numbers(vision: Any) -> int:
    """Numbers of a patch."""
    return vision.in_channels * vision.temporal_patch_size * vision.patch_size**2


def _of_blocks(model: Any, part: Any) -> int:
    """Elements of the weights of the model's repeated blocks in a part of it."""
    blocks = (module for module in part.modules() if type(module).__name__ in layer_names(model))
    return sum(weight.numel() for block in blocks for weight in block.parameters())


def _shapes(config: Any, dtype: torch.dtype) -> Any:
    """The model on `meta`: shapes without memory."""
    AttentionInterface.register(_SHAPES, _attention)
    ExpertsInterface.register(_SHAPES, _experts)
    with torch.device("meta"):
        model: Any = model_class(config.model_type).from_config(config, dtype=dtype, attn_implementation=_SHAPES)
    model.set_experts_implementation(_SHAPES)
    return model


def _kept_of_tokens(model: Any, tokens: int) -> int:
    """Bytes that the decoder keeps."""
    ids = torch.zeros((1, tokens), dtype=torch.long, device="meta")
    return _kept_bytes(model, lambda: model.get_decoder()(input_ids=ids, use_cache=False))


def _kept_of_images(model: Any, patches: int) -> int:
    """Bytes that the vision tower keeps for one image.

    What it would compute from the size of the image is given, as shapes: it can't on `meta`.
    """
    tower, vision = model.model.visual, model.config.vision_config
    ends = torch.tensor([0, patches])
    with torch.device("meta"):
        pixels = torch.empty((patches, _numbers(vision)), dtype=model.dtype)
        given = {
            "position_ids": torch.zeros((patches, 2), dtype=torch.long),
            "window_index": torch.zeros(patches // vision.spatial_merge_size**2, dtype=torch.long),
            "interp_indices": torch.zeros((patches, 4), dtype=torch.long),
            "interp_weights": torch.empty((patches, 4)),
        }
    return _kept_bytes(model, lambda: tower(pixels, grid_thw=None, cu_seqlens=ends, cu_window_seqlens=ends, **given))


def _kept_bytes(model: Any, forward: Callable[[], object]) -> int:
    """Bytes of the tensors that a forward pass keeps, besides parameters; each storage once."""
    parameters = [parameter.untyped_storage() for parameter in model.parameters()]
    theirs = set(map(id, parameters))  # a storage is one object while one refers to it
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in theirs:
            kept[id(storage)] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward()
    return sum(storage.nbytes() for storage in kept.values())


class _Kept(torch.autograd.Function):
    """What attention without a matrix [tokens, tokens] keeps: its inputs and its output."""

    @staticmethod
    def forward(ctx: FunctionCtx, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, out)
        return out


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: object = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Shapes of attention, as transformers calls it: [1, heads, tokens, size of a head] each."""
    del module, mask
    out: torch.Tensor = _Kept.apply(query, key, value)  # pyright: ignore[reportUnknownMemberType]: untyped in torch
    return out.transpose(1, 2).contiguous(), None


class _GroupedProduct(torch.autograd.Function):
    """What a product of each row with the weight of its expert keeps: the rows."""

    @staticmethod
    def forward(ctx: FunctionCtx, rows: torch.Tensor, weight: torch.Tensor, width: int) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        return rows.new_empty((len(rows), width))


def _experts(module: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Shapes of experts, as transformers calls them: `hidden` [tokens, H], and [tokens, K] which
    experts read a token, and how they are weighted.

    The grouped product of torch has shapes in bfloat16 alone.
    """

    def product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        width = weight.shape[-1 if module.is_transposed else -2]
        return _GroupedProduct.apply(rows, weight, width)  # pyright: ignore[reportUnknownMemberType]: untyped in torch

    rows = product(
        hidden.repeat_interleave(chosen.shape[-1], 0), module.gate_up_proj if module.has_gate else module.up_proj
    )
    rows = module._apply_gate(rows) if module.has_gate else module.act_fn(rows)
    out = product(rows, module.down_proj) * weights.reshape(-1, 1)
    return out.view(len(hidden), -1, hidden.shape[-1]).sum(1).to(hidden.dtype)
