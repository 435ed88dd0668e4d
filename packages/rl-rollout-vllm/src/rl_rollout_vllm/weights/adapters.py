"""LoRA adapters in the form that vLLM takes, from memory or from an HF PEFT folder."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.errors import ConfigError, WeightSyncError
from rl_protocol.support.peft_config import PICKLED, PICKLED_FILE, unread_field
from rl_rollout_vllm.config import AdapterConfig
from rl_rollout_vllm.weights.checkpoint import read_json, read_tensors

_REQUIRED = ("r", "lora_alpha", "target_modules")
_IMPLIED_BY_NAMES = ("exclude_modules", "layers_pattern", "layers_to_transform")
"""Settings that choose modules; vLLM takes them from the names of the tensors instead."""

_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")


@dataclass(frozen=True, slots=True)
class Adapter:
    """A checked adapter.

    Attributes:
        config: the fields of PEFT's `adapter_config.json` that vLLM reads.
        weights: copies of A [rank, in] and B [out, rank] of each module, which are loaded again
            after each update of the base weights.
    """

    config: Mapping[str, object]
    weights: tuple[WeightTensor, ...]


def adapter_of_tensors(weights: Iterable[WeightTensor], config: AdapterConfig | None) -> Adapter:
    """Make an adapter from tensors in memory and the engine's settings.

    Raises:
        WeightSyncError: the engine has no room for adapters, or the tensors do not fit.
    """
    config = _require_config(config)
    copies = tuple(WeightTensor(w.name, w.dtype, w.shape, w.data.copy()) for w in weights)
    rank = _rank(copies, config)
    return Adapter({"r": rank, "lora_alpha": config.alpha, "target_modules": list(config.target_modules)}, copies)


def read_adapter(folder: Path, config: AdapterConfig | None) -> Adapter:
    """Read the adapter of an HF PEFT folder, with its own settings.

    Raises:
        ConfigError: the folder can't be read.
        WeightSyncError: the adapter does not fit, or has a setting that vLLM does not apply, such
            as DoRA or a rank pattern.
    """
    config = _require_config(config)
    settings = read_json(folder / "adapter_config.json")
    _check_supported(folder, settings)
    file = folder / "adapter_model.safetensors"
    if (folder / PICKLED_FILE).exists() and not file.exists():
        raise ConfigError(f"{folder / PICKLED_FILE} {PICKLED}.")
    weights = tuple(read_tensors(file))
    rank = _rank(weights, config)
    if rank != settings["r"]:
        raise WeightSyncError(f"The adapter {folder} has tensors of rank {rank} and r={settings['r']!r}.")
    return Adapter({name: settings[name] for name in (*_REQUIRED, "use_rslora") if name in settings}, weights)


def _check_supported(folder: Path, settings: Mapping[str, object]) -> None:
    """Check that vLLM computes what peft does; it reads only `_REQUIRED` and `use_rslora`."""
    if settings.get("peft_type") != "LORA":
        raise WeightSyncError(
            f"The adapter {folder} has peft_type={settings.get('peft_type')!r}; vLLM supports adapters of peft_type='LORA'."
        )
    lost = unread_field(settings, (*_REQUIRED, *_IMPLIED_BY_NAMES, "use_rslora"))
    if lost is not None:
        field, why = lost
        raise WeightSyncError(f"The adapter {folder} can't be used by vLLM: {field} {why}. Merge it instead.")
    missing = [name for name in _REQUIRED if name not in settings]
    if missing:
        raise WeightSyncError(f"The adapter {folder} lacks {', '.join(missing)} in adapter_config.json.")


def _require_config(config: AdapterConfig | None) -> AdapterConfig:
    if config is None:
        raise WeightSyncError("This vLLM engine was started without room for adapters; set VLLMConfig.adapter.")
    return config


def _rank(weights: tuple[WeightTensor, ...], config: AdapterConfig) -> int:
    """Check the pairs of factors, and return their largest rank."""
    sides: dict[str, dict[str, WeightTensor]] = {}
    for weight in weights:
        match = _NAME.fullmatch(weight.name)
        if match is None or len(weight.shape) != 2:
            raise WeightSyncError(
                f"{weight.name!r} of shape {weight.shape} is not part of a LoRA adapter; expected base_model.model.….lora_A.weight or lora_B."
            )
        sides.setdefault(match["module"], {})[match["side"]] = weight
    if not sides:
        raise WeightSyncError("The adapter holds no tensors.")
    ranks: list[int] = []
    for module, pair in sides.items():
        if set(pair) != {"A", "B"} or pair["A"].shape[0] != pair["B"].shape[1]:
            found = {side: weight.shape for side, weight in pair.items()}
            raise WeightSyncError(f"The adapter of {module!r} needs A [rank, in] and B [out, rank]; got {found}.")
        if module.rpartition(".")[2] not in config.target_modules:
            raise WeightSyncError(
                f"The adapter has {module!r}; VLLMConfig.adapter.target_modules names {config.target_modules}."
            )
        ranks.append(pair["A"].shape[0])
    if max(ranks) > config.rank:
        raise WeightSyncError(
            f"The adapter has rank {max(ranks)}, the engine has room for {config.rank}: raise VLLMConfig.adapter.rank."
        )
    return max(ranks)
