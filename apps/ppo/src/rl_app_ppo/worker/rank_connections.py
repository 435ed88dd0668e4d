"""Errors of ranks that have lost their connection to each other, though their processes run."""

from __future__ import annotations

import socket
from collections.abc import Generator
from contextlib import contextmanager

from rl_protocol import WorkerError

_LIBRARIES = ("gloo", "NCCL")
_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "remote process exited or there was a network error",
)
"""What these libraries say of a connection; torch has no error class for gloo's."""


class RankConnectionError(WorkerError):
    """A rank of a model has lost its connection to another one, and they can't train on.

    The process of the other rank has died, or the network between their hosts was cut.
    """


@contextmanager
def named_rank_connections(worker: str, method: str) -> Generator[None]:
    """Name the worker and its host in the error of a lost connection between ranks.

    Args:
        worker: name of this process.
        method: what it runs.

    Raises:
        RankConnectionError: in place of what torch raises; other errors are unchanged.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if not (any(name in text for name in _LIBRARIES) and any(sign in text for sign in _LOST)):
            raise
        raise RankConnectionError(
            f"Worker {worker} on {socket.gethostname()} has lost its connection to another rank of its model during {method}: "
            f"{text.strip().splitlines()[0]}. The process of that rank has died, or the network between their hosts was cut, or "
            "trainer.network_interface is not the one through which they reach each other."
        ) from error
