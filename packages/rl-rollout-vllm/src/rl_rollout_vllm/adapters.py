"""LoRA adapters as vLLM wants them: PEFT's names and a few settings, from memory or from an HF PEFT folder. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rl_protocol.errors import ConfigError, WeightSyncError
from rl_protocol.peft_fields import PICKLED, PICKLED_FILE, unread_field
from rl_protocol.weights import WeightTensor
from rl_rollout_vllm.checkpoint import read_json, read_tensors
from rl_rollout_vllm.config import AdapterConfig

_REQUIRED = ("r", "lora_alpha", "target_modules")
_OF_TENSORS = ("exclude_modules", "layers_pattern", "layers_to_transform")
"""They say which modules are adapted, as the names of the tensors do, which vLLM goes by."""

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
        WeightSyncError: see `with_config`; or a setting that vLLM does not apply, such as DoRA or ranks of each module's own.
    """
    room = _room(room)
    settings = read_json(folder / "adapter_config.json")
    _check_served(folder, settings)
    file = folder / "adapter_model.safetensors"
    if (folder / PICKLED_FILE).exists() and not file.exists():
        raise ConfigError(f"{folder / PICKLED_FILE} {PICKLED}.")
    weights = tuple(read_tensors(file))
    rank = _rank(weights, room)
    if rank != settings["r"]:
        raise WeightSyncError(f"The adapter {folder} has tensors of rank {rank} and r={settings['r']!r}.")
    return Adapter({name: settings[name] for name in (*_REQUIRED, "use_rslora") if name in settings}, weights)


def _check_served(folder: Path, settings: Mapping[str, object]) -> None:
    """That vLLM computes with the adapter what peft does: of the settings it reads `_REQUIRED` and `use_rslora` alone."""
    if settings.get("peft_type") != "LORA":
        raise WeightSyncError(
            f"The adapter {folder} has peft_type={settings.get('peft_type')!r}; vLLM serves adapters of peft_type='LORA'."
        )
    lost = unread_field(settings, (*_REQUIRED, *_OF_TENSORS, "use_rslora"))
    if lost is not None:
        field, why = lost
        raise WeightSyncError(f"The adapter {folder} can't be served by vLLM: {field} {why}. Merge it instead.")
    missing = [name for name in _REQUIRED if name not in settings]
    if missing:
        raise WeightSyncError(f"The adapter {folder} lacks {', '.join(missing)} in adapter_config.json.")


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
