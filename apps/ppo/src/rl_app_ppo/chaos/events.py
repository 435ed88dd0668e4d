"""What the processes of a run have done, in a file that survives them all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import msgspec

Kind = Literal[
    "process",
    "begin",
    "rollout",
    "acknowledged",
    "failed",
    "scored",
    "trained",
    "version",
    "saved",
    "damaged",
    "dropped",
    "end",
]


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the file.

    What `number` is depends on the kind: of a process its id; of `begin` and `saved` the step of
    the checkpoint; of `damaged`, a changed byte, the step of the newest whole checkpoint; of
    `dropped` the rows that the journal found damaged; of `trained` the step; of `version` that of
    the weights; of `end` the rows that are left. `failed` are prompts whose rollout the driver has
    given up.
    """

    kind: Kind
    name: str = ""
    """Of the process."""
    number: int = 0
    uids: tuple[str, ...] = ()
    """Prompts."""


class EventLog:
    """Appends events to a file. A line is written with one call, so that no kill tears it.

    Args:
        path: of the file; made if missing.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, event: Event) -> None:
        """Append an event."""
        os.write(self._fd, msgspec.json.encode(event) + b"\n")

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def read_events(path: Path) -> list[Event]:
    """All events of the file, the oldest first; none if it does not exist."""
    if not path.exists():
        return []
    return msgspec.json.Decoder(Event).decode_lines(path.read_bytes())
