"""Run the ranks of a process group as forks of one process."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rl_protocol.support.rendezvous import RendezvousListener
    from rl_trainer.backends.world import World


def in_ranks(size: int, main: Callable[..., None], *arguments: object) -> None:
    """Call main(rank, *arguments) in `size` forks; exit with an error if one fails.

    A fork of multiprocessing ends without finalizing the interpreter. A rank that finalizes it
    aborts now and then: gloo's threads free the tensors of the last collective, need the GIL for
    it, and PyTorch ends with "terminate called without an active exception".
    """
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=main, args=(rank, *arguments)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        sys.exit(1)


def join_ranks(rank: int, size: int, listener: RendezvousListener) -> World:
    """Join the ranks of a world on the CPU; `listener` was opened before the forks."""
    from rl_protocol.support.rendezvous import Rendezvous
    from rl_trainer.backends.world import CPU, join_world

    if rank:
        listener.close()
    meeting = Rendezvous(rank=rank, size=size, address=listener.address, listener=None if rank else listener)
    return join_world(meeting, device=CPU, timeout_s=300, join_timeout_s=300)
