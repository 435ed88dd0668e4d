"""What server processes and threads are told, and what they say once they serve."""

from __future__ import annotations

import msgspec

from rl_transferqueue.liveness import ProcessId


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
    """For bytes; 0: one that is free."""


class ControllerSpec(msgspec.Struct, frozen=True, tag=True):
    """Serve the controller; `unit_bytes` is the capacity of every unit."""

    address: str
    units: tuple[str, ...]
    unit_bytes: int
    segment: int
    stored: bool
    """Blocks lie in a backend's stores."""
    listen: str = ""
    """See UnitSpec."""
    port: int = 0
    """For control messages, and the next one for bytes; 0: ones that are free."""


class ServeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a server process is told on its command line."""

    spec: UnitSpec | ControllerSpec
    parent: ProcessId
    ready_fd: int
    runtime_dir: str


class Ready(msgspec.Struct, frozen=True):
    """What it says on the pipe once it serves."""

    process: ProcessId
    memory_fd: int
    """What clients map: a unit's arena, the controller's board."""
    memory_bytes: int
    control: str = ""
    """See ControllerAddress."""
    bulk: str = ""
