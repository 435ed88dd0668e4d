"""Backends, which hold the bytes of a plane: built-in ones, and those of installed packages.

`simple` (storage units with shared-memory arenas) and `memory` (the same in threads of this
process) are built in. Any other is a `Backend` under the entry point group
`rl_transferqueue.backends`: the controller and one unit process per share of the memory do the
bookkeeping, and the blocks are in the backend's stores. Backends of other packages need the
operator's permission (`rl_protocol.support.plugins`).
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from rl_protocol.errors import ConfigError
from rl_protocol.wire import Buffer
from rl_transferqueue.wire.spans import Span

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint, EntryPoints

ENTRY_POINT_GROUP = "rl_transferqueue.backends"
BUILT_IN = ("memory", "simple")


class Share(NamedTuple):
    """One unit's part of a plane's memory."""

    plane: str
    """Name of the plane, to keep its blocks apart from those of others in the same store."""
    unit: int
    nbytes: int
    """Capacity in bytes."""
    address: str
    """`TransferQueueConfig.backend_address`."""


def block_key(span: Span) -> str:
    """Key of the block at the beginning of a span; unique until the controller reuses the span."""
    return f"{span.unit}-{span.offset}"


class BlockStore(Protocol):
    """Blocks of bytes by key.

    Calls block and come from several threads at a time. Errors are those of `rl_protocol.errors`.
    """

    def put_block(self, key: str, parts: Sequence[Buffer]) -> None:
        """Store the concatenated parts until `free`, also if the process that put them ends."""
        ...

    def get_block(self, key: str, nbytes: int) -> Buffer:
        """All bytes of a block; they do not change while anything refers to them."""
        ...

    def free(self, keys: Sequence[str]) -> None:
        """Remove blocks; missing ones are ignored."""
        ...

    def close(self) -> None:
        """Release this process's resources."""
        ...


@runtime_checkable
class Backend(Protocol):
    """A class without constructor arguments, named by an entry point."""

    def host(self, share: Share) -> BlockStore:
        """Provide the memory of a share.

        Called in its unit's process, with which the blocks end.
        """
        ...

    def join(self, share: Share) -> BlockStore:
        """Reach the blocks of a share, which is hosted already, from a client."""
        ...


def _entry_points() -> EntryPoints:
    from rl_protocol.support.plugins import installed_plugins  # slow to import, rarely needed

    return installed_plugins(ENTRY_POINT_GROUP)


def backend_names() -> tuple[str, ...]:
    """Every name that may be set, allowed or not; nothing is imported to find out."""
    return tuple(sorted({*BUILT_IN, *(point.name for point in _entry_points())}))


def load_backend(name: str) -> Backend:
    """The backend of that name, which is none of those built in.

    Raises:
        ConfigError: no package offers it, several do, or the operator does not allow it; what it
            needs is not installed; or it is no Backend.
    """
    from rl_protocol.support.plugins import load_installed, owner  # slow to import

    point = _offered(name)
    kind = load_installed(point)
    backend: object = kind() if callable(kind) else kind
    if not isinstance(backend, Backend):
        raise ConfigError(f"The backend {name!r} ({owner(point)}) is {backend!r}, which is no Backend.")
    return backend


def _offered(name: str) -> EntryPoint:
    from rl_protocol.support.plugins import owner

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
        f"TransferQueueConfig.backend: there is no backend {name!r}.{hint} Installed are {', '.join(names)}; others come with packages that "
        f"offer an entry point in group {ENTRY_POINT_GROUP}."
    )
