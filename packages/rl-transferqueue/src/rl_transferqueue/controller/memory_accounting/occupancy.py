"""Who holds the memory of a plane, for the error of a full plane. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_NAMED = 3
"""Holders of one kind that are named; the others are summed up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Occupancy:
    """Bytes by holder.

    >>> rows = {"train": 4096}
    >>> print(Occupancy(partitions=rows, reserved={}, read={}, waiting=2, waiting_bytes=128))
    Held by rows: partition 'train' 4096 bytes. 2 other puts wait for 128 bytes.
    """

    partitions: Mapping[str, int]
    """Of blocks with rows, by partition."""
    reserved: Mapping[str, int]
    """Reserved and not committed, by client."""
    read: Mapping[str, int]
    """Of blocks whose rows were cleared or replaced, by client that still reads them."""
    leased: Mapping[str, int] = field(default_factory=dict[str, int])
    """Of blocks with rows that leases keep in memory, by client; only where rows can leave it."""
    waiting: int
    """Other puts that wait for memory."""
    waiting_bytes: int

    def __str__(self) -> str:
        parts = (
            ("Held by rows", {f"partition {name!r}": nbytes for name, nbytes in self.partitions.items()}),
            ("Reserved for puts", self.reserved),
            ("Cleared, but still read", self.read),
            ("Kept in memory by readers", self.leased),
        )
        lines = [f"{what}: {_largest(holders)}." for what, holders in parts if holders]
        if self.waiting:
            puts = "1 other put waits" if self.waiting == 1 else f"{self.waiting} other puts wait"
            lines.append(f"{puts} for {self.waiting_bytes} bytes.")
        return " ".join(lines)


def by_client(held: Mapping[bytes, int], names: Mapping[bytes, str]) -> dict[str, int]:
    """Bytes by the names of sessions; several sessions may have one name.

    >>> by_client({b"1": 64, b"2": 64, b"3": 128}, {b"1": "pid 7", b"2": "pid 7"})
    {'pid 7': 128, 'clients that have ended': 128}
    """
    clients: dict[str, int] = {}
    for session, nbytes in held.items():
        name = names.get(session, "clients that have ended")
        clients[name] = clients.get(name, 0) + nbytes
    return clients


def _largest(holders: Mapping[str, int]) -> str:
    ranked = sorted(holders.items(), key=lambda holder: -holder[1])
    named = [f"{name} {nbytes} bytes" for name, nbytes in ranked[:_NAMED]]
    rest = ranked[_NAMED:]
    if rest:
        named.append(f"{len(rest)} more {sum(nbytes for _, nbytes in rest)} bytes")
    return ", ".join(named)
