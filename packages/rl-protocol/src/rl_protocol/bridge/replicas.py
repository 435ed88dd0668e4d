"""Replicas: ranks that compute the same rows, of which one fetches them for all."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import msgspec

from rl_protocol import errors, wire
from rl_protocol.batch.batch_data import BatchData
from rl_protocol.errors import DataPlaneError, RLError, WorkerError

_COLUMNS, _ERROR = b"\1", b"\0"


class Replicas(Protocol):
    """Ranks that work on the same rows (tensor, pipeline and context parallel).

    Only their leader uses the plane.
    """

    @property
    def leader(self) -> bool:
        """Whether this rank is the leader."""
        ...

    def share(self, message: bytes | None) -> bytes:
        """Broadcast the leader's bytes; all ranks call it together. Must have a deadline."""
        ...


@runtime_checkable
class ReplicaOfRanks(Protocol):
    """A backend whose model is divided over ranks that compute the same rows."""

    @property
    def replicas(self) -> Replicas | None:
        """This rank among those of its replica of the model; None: it is alone."""
        ...


def broadcast(replicas: Replicas, outcome: BatchData | RLError) -> None:
    """Send what the leader fetched, or its error, to the other ranks."""
    if isinstance(outcome, BatchData):
        replicas.share(b"".join((_COLUMNS, *map(bytes, wire.encode(outcome)))))
    else:
        replicas.share(_ERROR + msgspec.msgpack.encode((type(outcome).__name__, str(outcome))))


def receive(replicas: Replicas, name: str) -> BatchData:
    """What the leader fetched for the method `name`.

    Raises:
        DataPlaneError: the leader could not fetch; of the same class as its error.
        WorkerError: it failed otherwise, or a rank has ended.
    """
    message = replicas.share(None)
    if message[:1] == _COLUMNS:
        return wire.decode(message[1:])
    kind, text = msgspec.msgpack.decode(message[1:], type=tuple[str, str])
    found: object = getattr(errors, kind, None)
    error = found if isinstance(found, type) and issubclass(found, DataPlaneError) else WorkerError
    raise error(f"{name}: the leader of this rank's replica could not fetch: {text}")
