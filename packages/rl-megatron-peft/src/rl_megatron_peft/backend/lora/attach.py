"""Attach adapters to a Megatron-Core model, switch them off, and merge them."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from megatron.core.models.gpt import GPTModel

from rl_megatron_peft.backend.lora.adapter_layer import LoraLayer
from rl_megatron_peft.backend.lora.adapter_spec import AdapterSpec, covered_parts
from rl_megatron_peft.backend.lora.dropout import DropoutContext, InputDropout
from rl_megatron_peft.backend.model.gpt import ADAPTER, first_expert
from rl_megatron_peft.backend.parallel import Ranks
from rl_megatron_peft.base_model.experts import ExpertParameter
from rl_megatron_peft.base_model.model_shape import ModelShape
from rl_megatron_peft.base_model.naming import FUSED, MegatronModule
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
            False: one A per module, as PEFT does. gate and up of an expert always share one.
        seed: seed of the first weights and of dropout.
        dropout_context: names the training pass under way; None: nothing is ever dropped.

    Returns:
        This stage's adapters, by layer.

    Raises:
        ConfigError: no module is a target, or a name is none of a module; fused adapters or those
            of experts would cover part of a fused module; or there are adapters of experts with
            dropout or DoRA.
    """
    check_targets(config, shape, fused=fused)
    context = DropoutContext() if dropout_context is None else dropout_context
    found: list[LoraLayer] = []
    layers: list[Any] = list(cast(Any, model.decoder).layers)
    for layer in layers:
        for module, linear in _linears(layer, shape, ranks):
            if covered_parts(module, config):
                spec = AdapterSpec.of(module, config, shape, ranks.layout, fused=fused)
                dropout = InputDropout(config.dropout, seed, context, spec, ranks)
                adapter = LoraLayer(
                    spec, shape, ranks, base=linear.weight, dora=config.use_dora, seed=seed, dropout=dropout
                )
                linear.add_module(ADAPTER, adapter)
                linear.register_forward_hook(partial(_add_adapter, adapter))
                found.append(adapter)
    return found


def _linears(layer: Any, shape: ModelShape, ranks: Ranks) -> Iterator[tuple[MegatronModule, Any]]:
    """Yield the fused linear layers of a layer: names in the whole model, and the modules."""
    number = layer.layer_number - 1
    yield MegatronModule(number, "linear_qkv"), layer.self_attention.linear_qkv
    yield MegatronModule(number, "linear_proj"), layer.self_attention.linear_proj
    first = first_expert(shape, ranks)
    parts = enumerate(layer.mlp.experts.local_experts, first) if shape.experts else [(None, layer.mlp)]
    for expert, mlp in parts:
        yield MegatronModule(number, "linear_fc1", expert), mlp.linear_fc1
        yield MegatronModule(number, "linear_fc2", expert), mlp.linear_fc2


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
    layers = range(shape.layers)
    outside = ("linear_qkv", "linear_proj") if shape.experts else tuple(FUSED)
    dense = [MegatronModule(layer, name) for layer in layers for name in outside]
    # all experts of a layer have adapters, or none
    of_experts = [MegatronModule(layer, name, 0) for layer in layers for name in FUSED if name not in outside]
    if not any(covered_parts(module, config) for module in (*dense, *of_experts)):
        raise ConfigError(
            f"target_modules is {config.target_modules!r}, which is no module of this model of {shape.layers} layers.",
            field="target_modules",
        )
    _check_names(config, [*dense, *of_experts])
    if any(covered_parts(module, config) for module in of_experts):
        _check_experts(config)
    for module in dense if fused else ():
        _check_fused(config, module)


def _check_names(config: LoraConfig, modules: Sequence[MegatronModule]) -> None:
    """Check that each name is one of a module, as it is checked again when the adapter is saved."""
    layers = {module.layer for module in modules if covered_parts(module, config)}
    present = [name for module in modules if module.layer in layers for name in _names_of(module)]
    for name in config.target_modules if isinstance(config.target_modules, tuple) else ():
        if not any(module == name or module.endswith(f".{name}") for module in present):
            raise ConfigError(
                f"target_modules names {name!r}, which no layer with adapters has; remove it.", field="target_modules"
            )


def _names_of(module: MegatronModule) -> tuple[str, ...]:
    """The names by which settings choose the parts of a module."""
    if module.expert is not None:
        return ExpertParameter.holding(module).targets
    return tuple(part.name for part in module.parts)


def _check_fused(config: LoraConfig, module: MegatronModule) -> None:
    parts, names = module.parts, ", ".join(FUSED[module.fused])
    covered = [part for part in parts if config.covers(part.name)]
    ranks = {part.name: config.rank_of(part.name) for part in covered}
    if len(set(ranks.values())) > 1:
        raise ConfigError(
            f"Fused adapters of {names} share one A and have one rank; got {ranks}. Set fused=False.",
            field="rank_pattern",
        )
    if covered and len(covered) < len(parts):
        missing = ", ".join(part.name for part in parts if part not in covered)
        raise ConfigError(
            f"Fused adapters cover all of {names} or none; {missing} is not a target. Make it one, or set fused=False.",
            field="target_modules",
        )


def _check_experts(config: LoraConfig) -> None:
    for field, value, wanted in (("dropout", config.dropout, 0.0), ("use_dora", config.use_dora, False)):
        if value != wanted:
            raise ConfigError(
                f"LoRA {field} must be {wanted} with adapters of experts, for which PEFT has none other; got {value}. Or leave "
                "gate_proj, up_proj and down_proj out of target_modules.",
                field=field,
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
