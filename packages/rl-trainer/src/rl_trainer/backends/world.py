"""Where a process computes: its device, and the ranks that train one model with it."""

# torch documents the stores of torch.distributed but does not list them in __all__.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import datetime
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rl_protocol import WorkerError
from rl_protocol.support.rendezvous import Rendezvous

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

    def first_row(self, rows: int) -> int:
        """First of this rank's rows of a tensor with `rows`: FSDP2 cuts them like torch.chunk."""
        return min(self.rank * -(-rows // self.size), rows)

    def _reduce(self, values: Sequence[float], how: dist.ReduceOp.RedOpType) -> list[float]:
        if self.size == 1:
            return list(values)
        numbers = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(numbers, op=how)
        return numbers.tolist()


def join_world(meeting: Rendezvous, *, device: torch.device, timeout_s: float, join_timeout_s: float) -> World:
    """Join the other ranks of a model through a store on the host of rank 0.

    Args:
        meeting: this rank, and where it finds the others.
        device: the CPU (gloo), or a GPU (gloo for numbers, nccl for weights).
        timeout_s: longest wait for the other ranks in each collective.
        join_timeout_s: longest wait for the other ranks here.

    Raises:
        WorkerError: rank 0 can't be reached, or a rank did not join in time; names it.
    """
    for name, value in meeting.socket_settings.items():
        os.environ[name] = value if meeting.chosen else os.environ.get(name, value)
    if device.type == "cuda":
        torch.cuda.set_device(meeting.rank % torch.cuda.device_count())
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=_open_store(meeting, join_timeout_s),
        rank=meeting.rank,
        world_size=meeting.size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    return World(meeting.rank, meeting.size)


def _open_store(meeting: Rendezvous, timeout_s: float) -> dist.Store:
    """A store that all ranks have joined; with one rank, a store of this process."""
    if meeting.size == 1:
        return dist.HashStore()
    assert meeting.address is not None, "there are several ranks"
    timeout = datetime.timedelta(seconds=timeout_s)
    host, port = meeting.address.host, meeting.address.port
    listening = None if meeting.listener is None else meeting.listener.detach()
    try:
        tcp = dist.TCPStore(
            host,
            port,
            world_size=None,
            is_master=listening is not None,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listening,
        )
        store = dist.PrefixStore(meeting.address.key, tcp)
        _await_ranks(store, meeting, timeout_s)
    except RuntimeError as error:  # what torch raises if rank 0 does not answer, or its connection ends
        raise WorkerError(
            f"Rank {meeting.rank} of {meeting.size} lost, or did not find, rank 0 at {host}:{port} within {timeout_s:g} s: "
            f"{str(error).splitlines()[0]}. Rank 0 has died, or {meeting.interface.name} ({meeting.interface.address}) does not reach it: set "
            "Rendezvous.interface."
        ) from error
    return store


def _await_ranks(store: dist.Store, meeting: Rendezvous, timeout_s: float) -> None:
    """Wait until all ranks have come to the store.

    Raises:
        WorkerError: some did not; names them.
        RuntimeError: rank 0 died.
    """
    store.set(_joined(meeting.rank), meeting.interface.address)
    ranks = range(meeting.size)
    try:
        store.wait([_joined(rank) for rank in ranks], datetime.timedelta(seconds=timeout_s))
    except dist.DistStoreError as error:
        missing = [str(rank) for rank in ranks if not store.check([_joined(rank)])]
        if not missing:  # the last one has come since
            return
        raise WorkerError(
            f"Rank {', '.join(missing)} of {meeting.size} did not join rank {meeting.rank} within {timeout_s:g} s: it has died, or is slower to "
            "start (join_world.join_timeout_s), or does not reach rank 0 (Rendezvous.interface)."
        ) from error


def _joined(rank: int) -> str:
    return f"joined/{rank}"
