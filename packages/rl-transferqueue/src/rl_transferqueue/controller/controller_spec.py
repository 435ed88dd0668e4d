"""Start parameters of the controller."""

from __future__ import annotations

import msgspec

from rl_transferqueue.wire.descriptor import UnitAddress


class ControllerSpec(msgspec.Struct, frozen=True, tag=True):
    """Serve the controller."""

    address: str
    """Path of the unix socket to listen on."""
    units: tuple[str, ...]
    """Paths of the storage units' sockets; empty: the unit has ended before this controller."""
    unit_bytes: int
    """Capacity of every unit."""
    segment: int
    """Bytes of memory that a unit touches ahead of need, in one step."""
    hosts: int
    """Hosts of the plane at most; each has so many units, which join for the others."""
    stored: bool
    """Whether blocks are in a backend's stores and not in arenas."""
    listen: str = ""
    """Numeric address for clients of other hosts; empty: none."""
    port: int = 0
    """Port for control messages; 0: any free one."""
    bulk_port: int = 0
    """Port for bytes; 0: any free one."""
    journal: str = ""
    """Folder of the journal; empty: none."""
    every_put: bool = False
    """Whether the journal commits every put by itself."""
    verify: bool = False
    """Whether rows in memory are compared with the digests of their puts; needs a journal."""
    incarnation: int = 1
    """Counts the controllers of the plane from 1; each later one continues the sessions of the one
    before.
    """
    consumed: str = ""
    """File of the consumed rows, for a successor; empty: there will be none."""
    descriptor: str = ""
    """File of the plane's descriptor, which clients of other hosts ask for when they look for a
    successor; empty: there will be none.
    """
    successor_s: float = 0.0
    """Seconds that clients have to come back to a successor."""
    joined: tuple[UnitAddress, ...] = ()
    """Of a successor: the units of other hosts that have joined; some may have ended."""
