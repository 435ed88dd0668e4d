"""Attach adapters to a Megatron-Core model, switch them off, and merge them."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from megatron.core.models.gpt import GPTModel

from rl_megatron_peft.backend.lora.adapter_layer import LoraLayer
from rl_megatron_peft.backend.lora.adapter_spec import AdapterSpec
from rl_megatron_peft.backend.lora.dropout import DropoutContext, InputDropout
from rl_megatron_peft.backend.model.gpt import ADAPTER
from rl_megatron_peft.backend.parallel import Ranks
from rl_megatron_peft.base_model.model_shape import ModelShape
from rl_megatron_peft.base_model.naming import FUSED, HFModule, MegatronModule
from rl_megatron_peft.peft.lora_config import LoraConfig
from rl_protocol.errors import ConfigError


def attach(
    model: GPTModel,
    config: LoraConfig,
    shape: ModelShape,
    ranks: Ranks,
    *,
    fused: bool = True,
    seed: int = 0,
    dropout_context: DropoutContext | None = None,
) -> list[LoraLayer]:
    """Attach an adapter to each target layer of this stage. A new adapter changes no output.

    The layers keep their names and weights. Only the adapters require gradients.

    Args:
        model: a model without adapters.
        config: what is adapted.
        shape: shape of the model.
        ranks: place of this process.
        fused: share one A among q, k and v, and one among gate and up, as Megatron's LoRA does;
            False: one A per module, as PEFT does.
        seed: seed of the first weights and of dropout.
        dropout_context: names the training pass under way; None: nothing is ever dropped.

    Returns:
        This stage's adapters, by layer.

    Raises:
        ConfigError: no module is a target, one of an expert is, or fused adapters would cover part
            of a fused module.
    """
    check_targets(config, shape, fused=fused)
    context = DropoutContext() if dropout_context is None else dropout_context
    found: list[LoraLayer] = []
    layers: list[Any] = list(cast(Any, model.decoder).layers)
    for layer in layers:
        linears = {
            "linear_qkv": layer.self_attention.linear_qkv,
            "linear_proj": layer.self_attention.linear_proj,
        }
        if not shape.experts:
            linears |= {"linear_fc1": layer.mlp.linear_fc1, "linear_fc2": layer.mlp.linear_fc2}
        for name, linear in linears.items():
            module = MegatronModule(layer.layer_number - 1, name)
            if any(config.covers(part.name) for part in module.parts):
                spec = AdapterSpec.of(module, config, shape, ranks.layout, fused=fused)
                dropout = InputDropout(config.dropout, seed, context, spec, ranks)
                adapter = LoraLayer(
                    spec, shape, ranks, base=linear.weight, dora=config.use_dora, seed=seed, dropout=dropout
                )
                linear.add_module(ADAPTER, adapter)
                linear.register_forward_hook(partial(_add_adapter, adapter))
                found.append(adapter)
    return found


def _add_adapter(
    adapter: LoraLayer, layer: Any, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, torch.Tensor | None]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    out, skipped_bias = output  # Megatron may add a bias later; no supported family has one
    if not adapter.enabled:
        return output
    return adapter.adapted(out, inputs[0], layer.weight, layer.bias), skipped_bias


def check_targets(config: LoraConfig, shape: ModelShape, *, fused: bool) -> None:
    """Check that adapters of this configuration can be attached.

    Raises:
        ConfigError: they can't; names the setting.
    """
    every = [MegatronModule(layer, name).parts for layer in range(shape.layers) for name in FUSED]
    if not any(config.covers(part.name) for parts in every for part in parts):
        raise ConfigError(
            f"target_modules is {config.target_modules!r}, which is no module of this model of {shape.layers} layers.",
            field="target_modules",
        )
    if shape.experts:
        _check_no_experts(config)
    for name in FUSED if fused else ():
        for layer in range(shape.layers):
            parts = MegatronModule(layer, name).parts
            covered = [part.logical for part in parts if config.covers(part.name)]
            ranks = {part.name: config.rank_of(part.name) for part in parts if config.covers(part.name)}
            if len(set(ranks.values())) > 1:
                raise ConfigError(
                    f"Fused adapters of {', '.join(FUSED[name])} share one A and have one rank; got {ranks}. Set fused=False.",
                    field="rank_pattern",
                )
            if covered and len(covered) < len(parts):
                missing = ", ".join(part.name for part in parts if part.logical not in covered)
                raise ConfigError(
                    f"Fused adapters cover all of {', '.join(FUSED[name])} or none; {missing} is not a target. "
                    "Make it one, or set fused=False.",
                    field="target_modules",
                )


def _check_no_experts(config: LoraConfig) -> None:
    covered = [name for name in ("gate_proj", "up_proj", "down_proj") if config.covers(HFModule(0, name).name)]
    if covered:
        raise ConfigError(
            f"target_modules names {', '.join(covered)}, of experts, which get no adapters on Megatron-Core; got "
            f"{config.target_modules!r}. Leave them out.",
            field="target_modules",
        )


@contextmanager
def adapters_off(adapters: list[LoraLayer]) -> Generator[None]:
    """Switch the adapters off inside the block: the model is then the reference policy."""
    before = [adapter.enabled for adapter in adapters]
    for adapter in adapters:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter, enabled in zip(adapters, before, strict=True):
            adapter.enabled = enabled


@contextmanager
def merged(model: GPTModel) -> Generator[None]:
    """Merge the adapters into the weights inside the block; then restore the exact weights."""
    modules: list[Any] = list(model.modules())
    layers: list[tuple[Any, LoraLayer]] = [
        (module, adapter) for module in modules if isinstance(adapter := getattr(module, ADAPTER, None), LoraLayer)
    ]
    kept = [layer.weight.detach().clone() for layer, _ in layers]
    with torch.no_grad():
        for layer, adapter in layers:
            layer.weight.copy_(adapter.merged(layer.weight))
    try:
        with adapters_off([adapter for _, adapter in layers]):
            yield
    finally:
        with torch.no_grad():
            for (layer, _), weight in zip(layers, kept, strict=True):
                layer.weight.copy_(weight)
