"""The address of a plane: what a process needs to connect to it."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from rl_protocol.errors import UNREADABLE, OutputError, WireError
from rl_protocol.support.host_identity import this_host
from rl_transferqueue.wire.process_liveness import ProcessId

RUNTIME_PREFIX = "rltq-"
"""How the name of a plane's runtime directory begins."""
DESCRIPTOR_FILE = "plane.json"
"""The descriptor in it."""


class ControllerAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The controller of a plane."""

    address: str
    """`unix:<path of its socket>`."""
    process: ProcessId
    board_fd: int
    """File descriptor of the epochs in the controller's process."""
    board_bytes: int
    control: str = ""
    """ZeroMQ endpoint for clients of other hosts; empty: there is none."""
    bulk: str = ""
    """host:port of its bulk connections; empty: there are none."""
    incarnation: int = 1
    """Counts the controllers of the plane; only the one with the largest number is served."""


class UnitAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A storage unit of a plane."""

    address: str
    """`unix:<path of its socket>`."""
    process: ProcessId
    arena_fd: int
    """Number of the arena's file descriptor inside the unit's process."""
    arena_bytes: int
    bulk: str = ""
    """host:port of its bulk connections; empty: there are none."""
    host: str = ""
    """`rl_protocol.support.host_identity.this_host` of the unit."""
    control: str = ""
    """ZeroMQ endpoint for a controller of another host; empty: the controller is on its host."""


class PlaneDescriptor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Addresses of the processes of one plane: plain data without secrets, to pass to other
    processes."""

    controller: ControllerAddress
    units: tuple[UnitAddress, ...]
    host: str
    """`rl_protocol.support.host_identity.this_host` of the controller."""
    shared_memory: bool
    """False: clients on the same host use the network, too (`TransferQueueConfig.shared_memory`).
    """
    plane: str
    """Tells this plane from others."""
    backend: str
    """`TransferQueueConfig.backend`."""
    backend_address: str
    timeout_s: float
    """Default deadline of a call in seconds (`TransferQueueConfig.timeout_s`)."""
    read_cache_mb: int
    """`TransferQueueConfig.read_cache_mb`."""
    file: str = ""
    """Where the descriptor with the successor of the controller will be; empty: there is none."""
    successor_s: float = 0.0
    """Seconds that clients wait for it after the controller has ended."""

    def shares_memory(self, host: str) -> bool:
        """Whether this process shares the memory of the plane's processes on that host."""
        return self.shared_memory and host == this_host()

    def to_json(self) -> str:
        """The descriptor as one line of JSON."""
        return msgspec.json.encode(self).decode()

    def save(self, path: str | Path) -> None:
        """Write it to a file that this user alone may read, whole or not at all.

        Raises:
            OutputError: the file can't be written.
        """
        path = Path(path)
        draft = path.with_name(path.name + ".new")
        try:
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                file.write(self.to_json() + "\n")
            draft.replace(path)
        except OSError as error:
            raise OutputError(f"The plane's descriptor can't be written to {path}: {error.strerror}.") from error

    @classmethod
    def load(cls, path: str | Path) -> PlaneDescriptor:
        """The inverse of `save`.

        Raises:
            OutputError: the file can't be read.
            WireError: it is not a descriptor.
        """
        try:
            return cls.from_json(Path(path).read_bytes())
        except OSError as error:
            raise OutputError(f"The descriptor {path} can't be read: {error.strerror}.") from error

    @classmethod
    def from_json(cls, text: str | bytes) -> PlaneDescriptor:
        """The inverse of `to_json`.

        Raises:
            WireError: the text is not a descriptor.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except UNREADABLE as error:
            raise WireError(f"Not a plane descriptor: {error}.") from error
