"""Start parameters of server processes and threads, and what they report once they serve."""

from __future__ import annotations

from pathlib import Path

import msgspec

from rl_transferqueue.controller.controller_spec import ControllerSpec
from rl_transferqueue.wire.process_liveness import ProcessId


class UnitSpec(msgspec.Struct, frozen=True, tag=True):
    """Serve a storage unit; sizes in bytes."""

    index: int
    address: str
    capacity: int
    segment: int
    plane: str
    backend: str
    backend_address: str
    listen: str = ""
    """Numeric address for clients of other hosts; empty: none."""
    port: int = 0
    """Port for bytes, or for control messages if it `joins`, and then the next one for bytes; 0:
    any free ports."""
    joins: bool = False
    """Whether the controller is on another host."""


class ServeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The command-line argument of a server process."""

    spec: UnitSpec | ControllerSpec
    parent: ProcessId
    ready_fd: int
    runtime_dir: str


class Recovery(msgspec.Struct, frozen=True):
    """What a plane found in its journal.

    Attributes:
        rows_kept: rows that it has again.
        rows_incomplete: rows with a damaged or missing column, which it dropped.
        bytes_cut: bytes of puts that were never acknowledged.
        segments_removed: files that no acknowledged put needed.
    """

    rows_kept: int
    rows_incomplete: int
    bytes_cut: int
    segments_removed: int


class Ready(msgspec.Struct, frozen=True):
    """What a server reports once it serves."""

    process: ProcessId
    memory_fd: int
    """What clients map: a unit's arena or the controller's epochs."""
    memory_bytes: int
    control: str = ""
    """Endpoint for control messages from other hosts; empty: none."""
    bulk: str = ""
    recovery: Recovery | None = None
    """None: the server has no journal."""
    arenas: tuple[int, ...] = ()
    """Of a controller with a journal: file descriptor of the arena of each unit, in the unit; -1:
    the unit has ended."""


def heartbeat_file(runtime_dir: str | Path, pid: int) -> Path:
    """The heartbeat of a server process."""
    return Path(runtime_dir) / f"{pid}.beat"
