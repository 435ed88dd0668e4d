"""The calls of workers that have not been answered, and how many have ended."""

from __future__ import annotations

import itertools
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec

from rl_protocol import KVBatchMeta, RowKey
from rl_protocol.counted import counted
from rl_protocol.errors import UNREADABLE
from rl_trainer.workers.messages import LeasedPrompt, Partition

SHOWN = 8
"""Most prompts named in the description of one call."""


@dataclass(frozen=True, slots=True)
class OpenCall:
    """A call that waits for its answer."""

    worker: str
    method: str
    payload: bytes
    since: float
    """time.monotonic() of its beginning."""

    def describe(self, now: float) -> str:
        """One line: worker, stage, seconds so far, step, and prompts or rows."""
        line = f"{self.worker} has not answered {self.method!r} for {now - self.since:.0f} s"
        about = _about(self.payload)
        return f"{line}: {about}" if about else line


@dataclass(slots=True)
class CallLog:
    """The calls that the driver waits for; its event loop writes them, other threads read them.

    >>> log = CallLog()
    >>> with log.waiting("actor", "save", b""):
    ...     [call.method for call in log.open()]
    ['save']
    >>> log.ended
    1

    Attributes:
        ended: calls that were answered, failed, or were cancelled.
    """

    ended: int = 0
    _open: dict[int, OpenCall] = field(default_factory=dict[int, OpenCall])
    _number: itertools.count[int] = field(default_factory=itertools.count)

    @contextmanager
    def waiting(self, worker: str, method: str, payload: bytes) -> Generator[None]:
        """Note a call while it waits."""
        number = next(self._number)
        self._open[number] = OpenCall(worker, method, payload, time.monotonic())
        try:
            yield
        finally:
            del self._open[number]
            self.ended += 1

    def open(self) -> list[OpenCall]:
        """The calls that wait, the oldest first."""
        return list(self._open.values())  # one bytecode: the event loop adds none meanwhile


class _Subject(msgspec.Struct, frozen=True, kw_only=True):
    """What the messages of `rl_trainer.workers.messages` say about their work."""

    step: int | None = None
    partition: Partition | None = None
    prompts: tuple[LeasedPrompt, ...] = ()
    batch: KVBatchMeta | None = None


def _about(payload: bytes) -> str:
    """The step and the prompts or rows of a message; empty if it has none."""
    try:
        message = msgspec.msgpack.decode(payload, type=_Subject)
    except UNREADABLE:  # a message of the weight synchronization
        return ""
    step = message.step if message.partition is None else message.partition.step
    uids = [prompt.lease.uid for prompt in message.prompts]
    rows = ""
    if message.batch is not None:
        uids = list(dict.fromkeys(RowKey.parse(key).uid for key in message.batch.keys))
        rows = f"{counted(len(message.batch), 'row')} of "
    parts = [f"step {step}"] if step is not None else []
    return ", ".join([*parts, f"{rows}prompts {_some(uids)}"] if uids else parts)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:SHOWN])
    return f"{shown} and {len(names) - SHOWN} more" if len(names) > SHOWN else shown
