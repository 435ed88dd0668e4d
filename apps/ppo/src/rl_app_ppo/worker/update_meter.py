"""How well an update uses its GPU: model FLOPs utilization and peak memory. Imports torch and
transformers."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoConfig

from rl_app_ppo.config.placement import Role
from rl_app_ppo.config.schema import AppConfig
from rl_trainer.backends.loading import model_class
from rl_trainer.workers.model import UpdateMeter

_TERA = 1e12
_PEAKS = {
    "GB300": 2500 * _TERA,
    "GB200": 2500 * _TERA,
    "B300": 2250 * _TERA,
    "B200": 2250 * _TERA,
    "GH200": 989 * _TERA,
    "H200": 989 * _TERA,
    "H100 PCIe": 756 * _TERA,
    "H100 NVL": 835 * _TERA,
    "H100": 989 * _TERA,
    "H800": 989 * _TERA,
    "H20": 148 * _TERA,
    "A100": 312 * _TERA,
    "A800": 312 * _TERA,
    "L40S": 362 * _TERA,
    "L40": 181 * _TERA,
    "L20": 119.5 * _TERA,
    "L4": 121 * _TERA,
    "A40": 149.7 * _TERA,
    "A10": 125 * _TERA,
}
"""Dense bfloat16 FLOP/s by data sheet, by words of the device's name; the first that fits."""


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 FLOP/s of a GPU by its data sheet; None: it is not known here."""
    return next((peak for words, peak in _PEAKS.items() if re.search(rf"\b{words}\b", device_name)), None)


@dataclass(frozen=True, slots=True)
class TrainingFlops:
    """Floating-point operations of a forward and a backward pass, without recomputation.

    As verl's FlopsCounter and PaLM (arXiv 2204.02311, appendix B): 6 for each weight that
    multiplies a token, and 12 * layers * heads * size of a head for each pair of tokens of a
    sequence, although attention is causal. A frozen weight takes 4: it has no gradient.
    """

    token: float
    """For each token."""
    pair: float
    """For each pair of tokens of a sequence."""

    @classmethod
    def of(cls, path: Path, *, frozen: bool, head: bool = True) -> TrainingFlops:
        """Those of the language model in a folder.

        Args:
            path: Hugging Face folder, of which only config.json is read.
            frozen: adapters are trained, whose own operations are not counted.
            head: whether the model has its output layer.
        """
        config: Any = AutoConfig.from_pretrained(str(path), local_files_only=True)
        with torch.device("meta"):
            model: Any = model_class(config.model_type).from_config(config)
        text, output = config.get_text_config(), model.get_output_embeddings()
        weights = _multiplied(model.get_decoder(), getattr(text, "num_experts_per_tok", None))
        weights += output.weight.numel() if head else 0
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        factor = 4 if frozen else 6
        return cls(factor * weights, 12 * text.num_hidden_layers * text.num_attention_heads * size)

    def total(self, lengths: npt.NDArray[np.int64]) -> float:
        """Those of sequences of these lengths."""
        tokens = lengths.astype(np.float64)
        return float(self.token * tokens.sum() + self.pair * (tokens**2).sum())


def _multiplied(decoder: torch.nn.Module, experts_per_token: int | None) -> float:
    """Weights that multiply a token: matrices but embeddings, and of experts those that read it."""
    tables = {id(table.weight) for table in decoder.modules() if isinstance(table, torch.nn.Embedding)}
    found = 0.0
    for weight in decoder.parameters():
        if weight.dim() >= 2 and id(weight) not in tables:
            read = (experts_per_token or 1) / weight.shape[0] if weight.dim() == 3 else 1  # [experts, ...]
            found += weight.numel() * read
    return found


class GpuMeter:
    """An `UpdateMeter` of this process's GPU.

    Args:
        role: whose update it is, in the name of the metric.
        flops: of the model.
        epochs: passes over the rows in an update.
        sharing: ranks that compute the same rows together.
    """

    def __init__(self, role: str, flops: TrainingFlops, *, epochs: int, sharing: int = 1) -> None:
        self._role = role
        self._flops = flops
        self._passes = epochs / sharing
        self._peak = peak_flops(torch.cuda.get_device_name())

    def __call__(self, update: Callable[[], dict[str, float]], lengths: npt.NDArray[np.int64]) -> dict[str, float]:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        metrics = update()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
        if self._peak is not None:
            work = self._passes * self._flops.total(lengths)
            metrics[f"perf/mfu/{self._role}"] = work / seconds / self._peak
        return metrics | {
            "perf/max_memory_allocated_gb": torch.cuda.max_memory_allocated() / 2**30,
            "perf/max_memory_reserved_gb": torch.cuda.max_memory_reserved() / 2**30,
        }


def meter_of(
    role: Role, config: AppConfig, path: Path, device: torch.device, *, sharing: int = 1
) -> UpdateMeter | None:
    """The meter of the updates of a role on a device; None: it is not a GPU.

    Args:
        role: `actor` or `critic`.
        config: the configuration.
        path: folder of the model.
        device: of this rank.
        sharing: see GpuMeter.
    """
    if device.type != "cuda":
        return None
    critic = role == "critic"
    frozen = config.critic.use_lora if critic else bool(config.lora.rank)
    flops = TrainingFlops.of(path, frozen=frozen, head=not critic)
    return GpuMeter(role, flops, epochs=(config.critic if critic else config.actor).ppo_epochs, sharing=sharing)
