"""Gather adapters from the ranks into PEFT's form, and scatter them again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from rl_megatron_peft.backend.lora.adapter_layer import LoraLayer
from rl_megatron_peft.backend.parallel import Ranks, all_gather_tensor_parallel, broadcast_from_stage
from rl_megatron_peft.base_model.model_shape import ModelShape
from rl_megatron_peft.base_model.naming import TARGETS, HFModule
from rl_megatron_peft.errors import AdapterError
from rl_megatron_peft.peft.adapter_folder import Adapter, LoraPair
from rl_megatron_peft.peft.lora_config import LoraConfig
from rl_protocol import WeightTensor
from rl_protocol.torch import from_weight, to_weight

_NAMES = {"a": "lora_A", "b": "lora_B", "magnitude": "lora_magnitude_vector"}


def covered_modules(config: LoraConfig, shape: ModelShape) -> Iterator[HFModule]:
    """Yield every module that gets an adapter, by layer."""
    for layer in range(shape.layers):
        for logical in TARGETS:
            module = HFModule(layer, logical)
            if config.covers(module.name):
                yield module


def gather_adapter(
    adapters: Sequence[LoraLayer],
    config: LoraConfig,
    shape: ModelShape,
    ranks: Ranks,
    *,
    base_model: str = "",
    fingerprint: str = "",
) -> Adapter:
    """Return a copy of the whole adapter on every rank; a collective over a replica's ranks."""
    own = {adapter.spec.module: adapter for adapter in adapters}
    pairs: dict[str, LoraPair] = {}
    for module in covered_modules(config, shape):
        stage = ranks.layout.stage(module.name, shape)
        if stage == ranks.pipeline:
            held = own[module.megatron].factors_of(module.logical)
            whole = {side: all_gather_tensor_parallel(part.parameter, part.split) for side, part in held.items()}
        else:
            whole = {
                side: torch.empty(size, device=ranks.device) for side, size in _sizes(module, config, shape).items()
            }
        sent = {side: broadcast_from_stage(tensor.clone(), stage) for side, tensor in whole.items()}
        pairs[module.name] = LoraPair(**{side: _exported(module.name, tensor) for side, tensor in sent.items()})
    return Adapter(base_model=base_model, config=config, pairs=pairs, fingerprint=fingerprint)


def scatter_adapter(
    adapter: Adapter,
    adapters: Sequence[LoraLayer],
    config: LoraConfig,
    shape: ModelShape,
    ranks: Ranks,
    *,
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
        fingerprint: fingerprint of the model; not compared if it is empty here or in the adapter.
        source: where the adapter was read, for messages.

    Raises:
        AdapterError: base model, rank, scale, targets or shapes differ, or fused adapters can't
            hold the factors; names file and field. Nothing is changed.
    """
    _check_compatible(adapter, config, shape, fingerprint, source)
    new: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
    shared: dict[torch.nn.Parameter, tuple[str, torch.Tensor]] = {}
    own = {adapter.spec.module: adapter for adapter in adapters}
    for name, pair in adapter.pairs.items():
        module = HFModule.parse(name)
        layer = own.get(module.megatron)
        whole_a = from_weight(pair.a)
        if layer is not None:
            held = layer.factors_of(module.logical)
            first, kept = shared.setdefault(held["a"].parameter, (name, whole_a))
            if not torch.equal(kept, whole_a):
                raise AdapterError(
                    f"{source}: {first}.lora_A and {name}.lora_A differ, but fused adapters share one A; attach with fused=False.",
                    file=source,
                    field=f"{name}.lora_A",
                )
            new += [
                (held[side].parameter, _part(from_weight(tensor), held[side].split, ranks))
                for side, tensor in pair.tensors().items()
            ]
    with torch.no_grad():
        for parameter, value in new:
            parameter.copy_(value)


def _sizes(module: HFModule, config: LoraConfig, shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return the shape of each factor over all ranks."""
    out, inner = shape.linear(module.logical)
    rank = config.rank_of(module.name)
    return {"a": (rank, inner), "b": (out, rank)} | ({"magnitude": (out,)} if config.use_dora else {})


def _part(tensor: torch.Tensor, split: int | None, ranks: Ranks) -> torch.Tensor:
    return tensor if split is None else tensor.chunk(ranks.layout.tensor, dim=split)[ranks.tensor]


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
        for side, want in _sizes(HFModule.parse(name), config, shape).items():
            same(f"{name}.{_NAMES[side]} shape", tensors[side].shape, want)
