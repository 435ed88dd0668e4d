"""Settings of a plane."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rl_protocol.support.options import Options, option, require

DURABILITY = ("off", "commit", "every_put")


@dataclass(frozen=True, kw_only=True)
class TransferQueueConfig(Options):
    """Settings of one plane.

    >>> TransferQueueConfig(capacity_mb=64).unit_bytes
    33554432

    Raises:
        ConfigError: a value out of range; names the key.
    """

    num_storage_units: int = option(2, "processes that hold the data, on each host", ge=1, le=256)
    capacity_mb: int = option(
        1024,
        "MiB the plane may hold on each of its hosts, split evenly over the storage units there; memory is taken when used",
        ge=1,
    )
    segment_mb: int = option(16, "MiB of memory a storage unit touches ahead of need, in one step", ge=1)
    timeout_s: float = option(
        60.0, "deadline of a call on the plane for which the caller gives none, seconds", gt=0, lt=math.inf
    )

    read_cache_mb: int = option(
        128,
        "MiB of copied columns that each client keeps for another read of the same rows (rows of several blocks or of another host "
        "are copied); 0: none",
        ge=0,
    )

    backend: str = option(
        "simple",
        "where the bytes are stored (simple: shared memory of storage units; memory: threads of this process)",
        plugins="rl_transferqueue.backends",
    )
    backend_address: str = option(
        "", "where the backend is: a Ray cluster (empty: the one Ray finds), host:port of mooncake_master"
    )
    listen: str = option(
        "",
        "address of this host at which clients of other hosts are served: host (free ports), or host:port or [IPv6]:port (that port and "
        "those after it); beyond loopback it needs a key (RL_TQ_KEY_FILE). Empty: only this host, over unix sockets",
    )
    durability: str = option(
        "off",
        "what survives the death of all processes of the plane and a loss of power: nothing (off); or every acknowledged put, where puts that "
        "arrive during a write share the next one (commit), or each has its own (every_put)",
        choices=DURABILITY,
    )
    journal_dir: str = option(
        "",
        "folder of the journal, on a local disk; made if missing. A plane that starts with it has the rows of the one before. Empty: "
        "journal in the folder of the run; a plane without a run needs a folder",
        needs="durability!=off",
    )
    verify: bool = option(
        False,
        "compare rows in memory with the digests of their puts (xxh3) whenever a client asks where they are; rows that differ are read "
        "again from the journal. Memory of rows that share a put is free once all of them are cleared",
        needs="durability!=off",
    )
    shared_memory: bool = option(
        True, "clients on the plane's host share its memory; off: they use the network too (for tests)"
    )

    def check(self, path: str) -> None:
        require(
            self.capacity_mb >= self.num_storage_units,
            f"{path}capacity_mb",
            f"at least 1 MiB for each of the {self.num_storage_units} storage units",
            self.capacity_mb,
        )
        require(
            self.shared_memory or bool(self.listen),
            f"{path}listen",
            f"an address such as 127.0.0.1 with {path}shared_memory=false, which leaves clients no other way in",
            self.listen,
        )
        require(
            self.durability == "off" or self.backend in ("simple", "memory"),
            f"{path}durability",
            f"off with {path}backend={self.backend}, which keeps the bytes itself",
            self.durability,
        )
        for key, value in (("journal_dir", self.journal_dir), ("verify", self.verify)):
            require(
                not value or self.durability != "off",
                f"{path}{key}",
                f"left out with {path}durability=off, which keeps no journal (set {path}durability=commit to keep one)",
                value,
            )

    @property
    def unit_bytes(self) -> int:
        """Bytes one storage unit may hold: the largest block there can be."""
        return (self.capacity_mb << 20) // self.num_storage_units // 4096 * 4096
