"""The ranks that train one model together."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist


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


def join_world(rank: int, size: int, *, store: Path, device: str, timeout_s: float) -> World:
    """Join the other ranks of this host through a shared file; gloo talks over loopback.

    Args:
        rank: 0..size-1.
        size: number of ranks.
        store: a path that does not exist yet, the same for all ranks.
        device: cpu (gloo), or cuda (gloo for numbers, nccl for weights).
        timeout_s: longest wait for the other ranks, here and in each collective.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    return World(rank, size)
