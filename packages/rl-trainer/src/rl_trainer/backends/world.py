"""Where a process computes: its device, and the ranks that train one model with it."""

from __future__ import annotations

import datetime
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

_logger = logging.getLogger(__name__)

CPU = torch.device("cpu")


def device_of(setting: str) -> torch.device:
    """The device that a setting names; `auto`: the GPU if this process was given one, else CPU."""
    if setting != "auto":
        return torch.device(setting)
    if torch.cuda.is_available():
        return torch.device("cuda")
    if given := os.environ.get("CUDA_VISIBLE_DEVICES"):
        _logger.warning(
            "This process was given GPU %s, but torch %s finds no GPU, so it computes on the CPU: install a torch that was built for CUDA "
            "and fits the driver.",
            given,
            torch.__version__,
        )
    return CPU


def compute_deterministically() -> None:
    """Have the GPU of this process compute equal bits from equal inputs, as the CPU does."""
    if torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch requires it
        torch.use_deterministic_algorithms(True)


@dataclass(frozen=True, slots=True)
class World:
    """`size` processes that call the same methods in the same order; this one is `rank`."""

    rank: int = 0
    size: int = 1

    def total(self, values: Sequence[float]) -> list[float]:
        """The sum of each number over the ranks; all ranks pass equally many."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def largest(self, value: int) -> int:
        """Maximum over the ranks."""
        return int(self._reduce([float(value)], dist.ReduceOp.MAX)[0])

    def _reduce(self, values: Sequence[float], how: dist.ReduceOp.RedOpType) -> list[float]:
        if self.size == 1:
            return list(values)
        numbers = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(numbers, op=how)
        return numbers.tolist()


def join_world(rank: int, size: int, *, store: Path, device: torch.device, timeout_s: float) -> World:
    """Join the other ranks of this host through a shared file; gloo talks over loopback.

    Args:
        rank: 0..size-1.
        size: number of ranks.
        store: a path that does not exist yet, the same for all ranks.
        device: the CPU (gloo), or a GPU (gloo for numbers, nccl for weights).
        timeout_s: longest wait for the other ranks, here and in each collective.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device.type == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    return World(rank, size)
