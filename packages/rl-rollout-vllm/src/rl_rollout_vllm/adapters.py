"""LoRA adapters as vLLM wants them: PEFT's names and a few settings, from memory or from an HF PEFT folder. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rl_protocol.errors import WeightSyncError
from rl_protocol.weights import WeightTensor
from rl_rollout_vllm.checkpoint import read_json, read_tensors
from rl_rollout_vllm.config import AdapterConfig

_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that was checked.

    Attributes:
        config: what vLLM reads of PEFT's `adapter_config.json`.
        weights: pairs of A [rank, in] and B [out, rank], copied: they are loaded again after each update of the base weights.
    """

    config: Mapping[str, object]
    weights: tuple[WeightTensor, ...]


def with_config(weights: Iterable[WeightTensor], room: AdapterConfig | None) -> Adapter:
    """An adapter from memory, scaled by the engine's own settings.

    Raises:
        WeightSyncError: the engine has no room for adapters, or the tensors are no adapter that fits.
    """
    room = _room(room)
    copies = tuple(WeightTensor(w.name, w.dtype, w.shape, w.data.copy()) for w in weights)
    rank = _rank(copies, room)
    return Adapter({"r": rank, "lora_alpha": room.alpha, "target_modules": list(room.target_modules)}, copies)


def read_adapter(folder: Path, room: AdapterConfig | None) -> Adapter:
    """The adapter of an HF PEFT folder, with the settings it was trained with.

    Raises:
        ConfigError: the folder can't be read.
        WeightSyncError: see `with_config`; or a kind of adapter that vLLM does not know.
    """
    room = _room(room)
    settings = read_json(folder / "adapter_config.json")
    for name in ("use_dora", "modules_to_save"):
        if settings.get(name):
            raise WeightSyncError(
                f"The adapter {folder} has {name}={settings[name]!r}, which vLLM can't serve: merge it instead."
            )
    weights = tuple(read_tensors(folder / "adapter_model.safetensors"))
    _rank(weights, room)
    known = ("r", "lora_alpha", "target_modules", "bias", "use_rslora", "rank_pattern", "alpha_pattern")
    return Adapter({name: settings[name] for name in known if name in settings}, weights)


def _room(room: AdapterConfig | None) -> AdapterConfig:
    if room is None:
        raise WeightSyncError("This vLLM engine was started without room for adapters; set VLLMConfig.adapter.")
    return room


def _rank(weights: tuple[WeightTensor, ...], room: AdapterConfig) -> int:
    """The largest rank of the pairs."""
    sides: dict[str, dict[str, WeightTensor]] = {}
    for weight in weights:
        match = _NAME.fullmatch(weight.name)
        if match is None or len(weight.shape) != 2:
            raise WeightSyncError(
                f"{weight.name!r} of shape {weight.shape} is no part of a LoRA adapter; expected base_model.model.….lora_A.weight or lora_B."
            )
        sides.setdefault(match["module"], {})[match["side"]] = weight
    if not sides:
        raise WeightSyncError("The adapter holds no tensors.")
    ranks: list[int] = []
    for module, pair in sides.items():
        if set(pair) != {"A", "B"} or pair["A"].shape[0] != pair["B"].shape[1]:
            found = {side: weight.shape for side, weight in pair.items()}
            raise WeightSyncError(f"The adapter of {module!r} needs A [rank, in] and B [out, rank]; got {found}.")
        if module.rpartition(".")[2] not in room.target_modules:
            raise WeightSyncError(
                f"The adapter has {module!r}; VLLMConfig.adapter.target_modules names {room.target_modules}."
            )
        ranks.append(pair["A"].shape[0])
    if max(ranks) > room.rank:
        raise WeightSyncError(
            f"The adapter has rank {max(ranks)}, the engine has room for {room.rank}: raise VLLMConfig.adapter.rank."
        )
    return max(ranks)
