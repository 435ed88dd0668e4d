"""Where the bytes of a plane lie, by name: built-in, or what installed packages offer under `rl_transferqueue.backends`.

`simple` (storage units with shared-memory arenas) and `memory` (the same in threads of this process) are part of the plane. Any other backend is
a `Backend`: the controller and one unit process per share of the memory keep the books as ever (who has which row, how much room there is, who
waits, what may go), and the blocks lie in the backend's stores. Those of other packages load where the operator allows it (`rl_protocol.plugins`).
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from rl_protocol.errors import ConfigError
from rl_protocol.wire import Buffer

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint, EntryPoints

ENTRY_POINT_GROUP = "rl_transferqueue.backends"
BUILT_IN = ("memory", "simple")


class Share(NamedTuple):
    """One unit's part of a plane's memory."""

    plane: str
    """Tells this plane's blocks from those of others in the same store."""
    unit: int
    nbytes: int
    """Most bytes that blocks take in it at a time."""
    address: str
    """`TransferQueueConfig.backend_address`: where the store is."""


class BlockStore(Protocol):
    """Blocks of bytes by key. Calls block and are made in threads, several at a time; errors are of rl_protocol.errors."""

    def put_block(self, key: str, parts: Sequence[Buffer]) -> None:
        """Keep the parts, one after the other, until `free`; the process that put them may die."""
        ...

    def get_block(self, key: str, nbytes: int) -> Buffer:
        """All bytes of a block, which do not change as long as anything refers to them."""
        ...

    def free(self, keys: Sequence[str]) -> None:
        """Forget blocks; those that are not there are no error."""
        ...

    def close(self) -> None:
        """The process is done with the store."""
        ...


@runtime_checkable
class Backend(Protocol):
    """What an entry point names: a class without arguments. Importing it loads what it needs."""

    def host(self, share: Share) -> BlockStore:
        """Provide the memory of a share; the caller is its unit's process, and the blocks end with it."""
        ...

    def join(self, share: Share) -> BlockStore:
        """Reach the blocks of a share, which is hosted already, from a client."""
        ...


def _entry_points() -> EntryPoints:
    from importlib.metadata import entry_points  # slow to load, and needed by those alone who start or name a backend

    return entry_points(group=ENTRY_POINT_GROUP)


def backend_names() -> tuple[str, ...]:
    """Every name that may be set, allowed or not; nothing is imported to find out."""
    return tuple(sorted({*BUILT_IN, *(point.name for point in _entry_points())}))


def check_backend(name: str) -> None:
    """Check, without importing anything of it, that there is one backend of that name and that it may load.

    Raises:
        ConfigError: nobody offers it, several do, or the operator does not allow it (`rl_protocol.plugins`).
    """
    if name not in BUILT_IN:
        from rl_protocol.plugins import check_installed  # as slow to load, and the built-in ones do without

        check_installed(_offered(name))


def load_backend(name: str) -> Backend:
    """The backend of that name, which is none of those built in.

    Raises:
        ConfigError: as `check_backend`, or what it needs is not installed, or it is no Backend.
    """
    from rl_protocol.plugins import load_installed, owner  # see check_backend

    point = _offered(name)
    kind = load_installed(point)
    backend: object = kind() if callable(kind) else kind
    if not isinstance(backend, Backend):
        raise ConfigError(f"The backend {name!r} ({owner(point)}) is {backend!r}, which is no Backend.")
    return backend


def _offered(name: str) -> EntryPoint:
    from rl_protocol.plugins import owner

    points = [point for point in _entry_points() if point.name == name]
    if len(points) == 1:
        return points[0]
    if points:
        owners = ", ".join(owner(point) for point in points)
        raise ConfigError(f"Several packages offer a backend {name!r}: {owners}. Uninstall all but one.")
    names = backend_names()
    close = difflib.get_close_matches(name, names, 1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ConfigError(
        f"transfer_queue.backend: there is no backend {name!r}.{hint} Installed are {', '.join(names)}; others come with packages that "
        f"offer an entry point in group {ENTRY_POINT_GROUP}."
    )
