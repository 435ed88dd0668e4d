"""Between adapters spread over ranks and adapters as PEFT writes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from rl_megatron_peft.adapter import Adapter, LoraPair
from rl_megatron_peft.backend.lora import Lora
from rl_megatron_peft.backend.parallel import Ranks, from_stage, whole_of_layer
from rl_megatron_peft.config import LoraConfig
from rl_megatron_peft.errors import AdapterError
from rl_megatron_peft.family import ModelShape
from rl_megatron_peft.naming import TARGETS, HFModule
from rl_protocol import WeightTensor
from rl_protocol.torch import from_weight, to_weight

_NAMES = {"a": "lora_A", "b": "lora_B", "magnitude": "lora_magnitude_vector"}


def covered_modules(config: LoraConfig, shape: ModelShape) -> Iterator[HFModule]:
    """Every module that gets an adapter, by layer."""
    for layer in range(shape.layers):
        for logical in TARGETS:
            module = HFModule(layer, logical)
            if config.covers(module.name):
                yield module


def gather_adapter(
    adapters: Sequence[Lora],
    config: LoraConfig,
    shape: ModelShape,
    ranks: Ranks,
    *,
    base_model: str = "",
    fingerprint: str = "",
) -> Adapter:
    """The whole adapter, on every rank; a collective over the ranks that share the model. The tensors are copies."""
    own = {lora.module: lora for lora in adapters}
    pairs: dict[str, LoraPair] = {}
    for module in covered_modules(config, shape):
        stage = ranks.layout.stage(module.name, shape)
        if stage == ranks.pipeline:
            held = own[module.megatron].parts(module.logical)
            whole = {side: whole_of_layer(part.parameter, part.split) for side, part in held.items()}
        else:
            whole = {
                side: torch.empty(size, device=ranks.device) for side, size in _sizes(module, config, shape).items()
            }
        sent = {side: from_stage(tensor.clone(), stage) for side, tensor in whole.items()}
        pairs[module.name] = LoraPair(**{side: _exported(module.name, tensor) for side, tensor in sent.items()})
    return Adapter(base_model=base_model, config=config, pairs=pairs, fingerprint=fingerprint)


def scatter_adapter(
    adapter: Adapter,
    adapters: Sequence[Lora],
    config: LoraConfig,
    shape: ModelShape,
    ranks: Ranks,
    *,
    fingerprint: str = "",
    source: str = "the adapter",
) -> None:
    """Take over an adapter that every rank has read; nothing is changed before all of it has been checked.

    Args:
        adapter: what is taken over.
        adapters, config: what was attached.
        shape, ranks: of the model.
        fingerprint: of the model's base; empty, here or in the adapter: not compared.
        source: where the adapter was read, for messages.

    Raises:
        AdapterError: another base model, rank, scale, target or shape, or factors that fused adapters can't hold; names file and field.
    """
    _check_same(adapter, config, shape, fingerprint, source)
    new: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
    shared: dict[torch.nn.Parameter, tuple[str, torch.Tensor]] = {}
    own = {lora.module: lora for lora in adapters}
    for name, pair in adapter.pairs.items():
        module = HFModule.parse(name)
        lora = own.get(module.megatron)
        whole_a = from_weight(pair.a)
        if lora is not None:
            held = lora.parts(module.logical)
            first, kept = shared.setdefault(held["a"].parameter, (name, whole_a))
            if not torch.equal(kept, whole_a):
                raise AdapterError(
                    f"{source}: {first}.lora_A and {name}.lora_A differ, and fused adapters have one A for both; attach with fused=False.",
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
    """Shape of each tensor that there is, whole."""
    out, inner = shape.linear(module.logical)
    rank = config.rank_of(module.name)
    return {"a": (rank, inner), "b": (out, rank)} | ({"magnitude": (out,)} if config.use_dora else {})


def _part(tensor: torch.Tensor, split: int | None, ranks: Ranks) -> torch.Tensor:
    return tensor if split is None else tensor.chunk(ranks.layout.tensor, dim=split)[ranks.tensor]


def _exported(name: str, tensor: torch.Tensor) -> WeightTensor:
    return to_weight(name, tensor.cpu().contiguous())


def _check_same(adapter: Adapter, config: LoraConfig, shape: ModelShape, fingerprint: str, source: str) -> None:
    def same(field: str, got: object, want: object, what: str = "") -> None:
        if got != want:
            raise AdapterError(
                f"{source}: {what or field} is {got!r}, the model's is {want!r}; they must be the same.",
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
            f"{source}: its modules are not the model's targets: it lacks {missing or 'none'} and has {more or 'none'} besides.",
            file=source,
            field=(missing or more)[0],
        )
    for name, pair in adapter.pairs.items():
        same("rank", adapter.config.rank_of(name), config.rank_of(name), f"the rank of {name}")
        same("alpha", adapter.config.scaling_of(name), config.scaling_of(name), f"the scale of {name}")
        tensors = pair.tensors()
        for side, want in _sizes(HFModule.parse(name), config, shape).items():
            same(f"{name}.{_NAMES[side]} shape", tensors[side].shape, want)
