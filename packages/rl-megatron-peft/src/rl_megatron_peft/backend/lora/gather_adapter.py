"""Gather adapters from the ranks into PEFT's form, and scatter them again.

PEFT keeps the factors of all experts of a layer in one A [experts * rank, in] and in one B
[out, rank * experts], whose columns are ordered by rank, then by expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from rl_megatron_peft.backend.lora.adapter_layer import LoraFactor, LoraLayer
from rl_megatron_peft.backend.parallel import (
    Ranks,
    all_gather_tensor_parallel,
    broadcast_from_expert_rank,
    broadcast_from_stage,
)
from rl_megatron_peft.base_model.experts import EXPERT_PARAMETERS, ExpertParameter
from rl_megatron_peft.base_model.model_shape import ModelShape
from rl_megatron_peft.base_model.naming import TARGETS, HFModule, MegatronModule
from rl_megatron_peft.errors import AdapterError
from rl_megatron_peft.peft.adapter_folder import Adapter, LoraPair
from rl_megatron_peft.peft.lora_config import LoraConfig
from rl_protocol import WeightTensor
from rl_protocol.torch import from_weight, to_weight

_Own = Mapping[MegatronModule, LoraLayer]
_New = list[tuple[torch.nn.Parameter, torch.Tensor]]
_NAMES = {"a": "lora_A", "b": "lora_B", "magnitude": "lora_magnitude_vector"}


def covered_modules(config: LoraConfig, shape: ModelShape) -> Iterator[HFModule | ExpertParameter]:
    """Yield by layer every module that gets an adapter, and every parameter of experts."""
    of_experts = [name for parameter in EXPERT_PARAMETERS for name in ExpertParameter(0, parameter).logical]
    for layer in range(shape.layers):
        for logical in TARGETS:
            module = HFModule(layer, logical)
            if not (shape.experts and logical in of_experts) and config.covers(module.name):
                yield module
        for name in EXPERT_PARAMETERS if shape.experts else ():
            parameter = ExpertParameter(layer, name)
            if config.covers_experts(parameter):
                yield parameter


def gather_adapter(
    adapters: Sequence[LoraLayer],
    config: LoraConfig,
    shape: ModelShape,
    ranks: Ranks,
    *,
    base_model: str = "",
    fingerprint: str = "",
) -> Adapter:
    """Return a copy of the whole adapter on every rank.

    A collective over the ranks that share a replica of the model, experts included.
    """
    own = {adapter.spec.module: adapter for adapter in adapters}
    pairs: dict[str, LoraPair] = {}
    for module in covered_modules(config, shape):
        stage = ranks.layout.stage(module.name, shape)
        if stage == ranks.pipeline:
            whole = _gathered(own, module, shape, ranks)
        else:
            whole = {
                side: torch.empty(size, device=ranks.device) for side, size in _sizes(module, config, shape).items()
            }
        sent = {side: broadcast_from_stage(tensor.clone(), stage) for side, tensor in whole.items()}
        pairs[module.name] = LoraPair(**{side: _exported(module.name, tensor) for side, tensor in sent.items()})
    return Adapter(base_model=base_model, config=config, pairs=pairs, fingerprint=fingerprint)


def _gathered(
    own: _Own, module: HFModule | ExpertParameter, shape: ModelShape, ranks: Ranks
) -> dict[str, torch.Tensor]:
    """Return the factors, in PEFT's form, of a module in a layer of this stage."""
    if isinstance(module, HFModule):
        held = own[module.megatron].factors_of(module.logical)
        return {side: all_gather_tensor_parallel(part.parameter, part.split) for side, part in held.items()}
    local = shape.experts // ranks.layout.expert
    first = ranks.expert * local
    layers = [own[module.megatron(first + number)] for number in range(local)]
    held = [[layer.factors_of(logical) for layer in layers] for logical in module.logical]
    a = _of_experts([one["a"] for one in held[0]], ranks)
    b = torch.cat([_of_experts([one["b"] for one in part], ranks) for part in held], dim=1)
    return {"a": a.flatten(0, 1), "b": b.permute(1, 2, 0).flatten(1)}


def _of_experts(held: Sequence[LoraFactor], ranks: Ranks) -> torch.Tensor:
    """Return a factor of all experts [experts, ...], given those of this rank's experts."""
    split = held[0].split
    stacked = torch.stack([factor.parameter.detach() for factor in held])
    own = all_gather_tensor_parallel(stacked, None if split is None else split + 1)
    parts = (
        broadcast_from_expert_rank(own.clone() if rank == ranks.expert else torch.empty_like(own), rank)
        for rank in range(ranks.layout.expert)
    )
    return torch.cat(list(parts))


def scatter_adapter(
    adapter: Adapter,
    adapters: Sequence[LoraLayer],
    config: LoraConfig,
    shape: ModelShape,
    ranks: Ranks,
    *,
    fused: bool,
    fingerprint: str = "",
    source: str = "the adapter",
) -> None:
    """Copy an adapter that every rank has read into the attached ones, after checking all of it.

    Args:
        adapter: the adapter to copy from.
        adapters: the attached adapters.
        config: their configuration.
        shape: shape of the model.
        ranks: place of this process.
        fused: the attached adapters are fused.
        fingerprint: fingerprint of the model; not compared if it is empty here or in the adapter.
        source: where the adapter was read, for messages.

    Raises:
        AdapterError: base model, rank, scale, targets or shapes differ, or fused adapters can't
            hold the factors; names file and field. Every rank raises it, whatever its stage, and
            nothing is changed.
    """
    _check_compatible(adapter, config, shape, fingerprint, source)
    if fused:
        _check_shared_a(adapter, source)
    new: _New = []
    own = {adapter.spec.module: adapter for adapter in adapters}
    for name, pair in adapter.pairs.items():
        parameter = ExpertParameter.parse(name)
        if parameter is not None:
            new += _scattered(own, parameter, pair, shape, ranks)
            continue
        module = HFModule.parse(name)
        layer = own.get(module.megatron)
        if layer is not None:
            held = layer.factors_of(module.logical)
            new += [
                (held[side].parameter, _part(from_weight(tensor), held[side].split, ranks))
                for side, tensor in pair.tensors().items()
            ]
    with torch.no_grad():
        for parameter, value in new:
            parameter.copy_(value)


def _scattered(own: _Own, parameter: ExpertParameter, pair: LoraPair, shape: ModelShape, ranks: Ranks) -> _New:
    """Return the factors of this rank's experts and their new values."""
    new: _New = []
    a_of = from_weight(pair.a).unflatten(0, (shape.experts, -1))
    b_of = from_weight(pair.b).unflatten(1, (-1, shape.experts)).permute(2, 0, 1)
    for expert, (a, b) in enumerate(zip(a_of, b_of, strict=True)):
        layer = own.get(parameter.megatron(expert))
        if layer is None:
            continue
        rows = b.chunk(len(parameter.logical))
        for logical, part in zip(parameter.logical, rows, strict=True):
            held = layer.factors_of(logical)
            new += [
                (held[side].parameter, _part(value, held[side].split, ranks)) for side, value in (("a", a), ("b", part))
            ]
    return new


def _sizes(module: HFModule | ExpertParameter, config: LoraConfig, shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return the shape of each factor over all ranks."""
    rank = config.rank_of(module.name)
    if isinstance(module, ExpertParameter):
        linear = [shape.linear(logical) for logical in module.logical]
        return {"a": (shape.experts * rank, linear[0][1]), "b": (sum(out for out, _ in linear), rank * shape.experts)}
    out, inner = shape.linear(module.logical)
    return {"a": (rank, inner), "b": (out, rank)} | ({"magnitude": (out,)} if config.use_dora else {})


def _part(tensor: torch.Tensor, split: int | None, ranks: Ranks) -> torch.Tensor:
    return tensor if split is None else tensor.chunk(ranks.layout.tensor, dim=split)[ranks.tensor]


def _check_shared_a(adapter: Adapter, source: str) -> None:
    """Check the modules that Megatron fuses for different A, also those on other stages."""
    first: dict[MegatronModule, tuple[str, torch.Tensor]] = {}
    for name, pair in adapter.pairs.items():
        if ExpertParameter.parse(name) is not None:
            continue
        whole = from_weight(pair.a)
        before, kept = first.setdefault(HFModule.parse(name).megatron, (name, whole))
        if not torch.equal(kept, whole):
            raise AdapterError(
                f"{source}: {before}.lora_A and {name}.lora_A differ, but fused adapters share one A; attach with fused=False.",
                file=source,
                field=f"{name}.lora_A",
            )


def _exported(name: str, tensor: torch.Tensor) -> WeightTensor:
    return to_weight(name, tensor.cpu().contiguous())


def _check_compatible(adapter: Adapter, config: LoraConfig, shape: ModelShape, fingerprint: str, source: str) -> None:
    def same(field: str, got: object, want: object, what: str = "") -> None:
        if got != want:
            raise AdapterError(
                f"{source}: {what or field} is {got!r}, the model's is {want!r}; they must be equal.",
                file=source,
                field=field,
            )

    if fingerprint and adapter.fingerprint:
        same("base_model_fingerprint", adapter.fingerprint, fingerprint)
    same("use_dora", adapter.config.use_dora, config.use_dora)
    wanted = [module.name for module in covered_modules(config, shape)]
    if set(wanted) != set(adapter.pairs):
        missing, more = sorted(set(wanted) - set(adapter.pairs)), sorted(set(adapter.pairs) - set(wanted))
        raise AdapterError(
            f"{source}: its modules are not the model's targets: missing {missing or 'none'}, unexpected {more or 'none'}.",
            file=source,
            field=(missing or more)[0],
        )
    for name, pair in adapter.pairs.items():
        same("rank", adapter.config.rank_of(name), config.rank_of(name), f"the rank of {name}")
        same("alpha", adapter.config.scaling_of(name), config.scaling_of(name), f"the scale of {name}")
        tensors = pair.tensors()
        module = ExpertParameter.parse(name) or HFModule.parse(name)
        for side, want in _sizes(module, config, shape).items():
            same(f"{name}.{_NAMES[side]} shape", tensors[side].shape, want)
