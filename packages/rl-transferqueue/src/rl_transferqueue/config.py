"""Settings of a plane."""

from __future__ import annotations

from dataclasses import dataclass, field

from rl_protocol.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TransferQueueConfig:
    """Settings of one plane; the section `transfer_queue` of an application's configuration.

    >>> TransferQueueConfig(capacity_mb=64).unit_bytes
    33554432

    Raises:
        ConfigError: a value out of range; names the key.
    """

    num_storage_units: int = field(default=2, metadata={"help": "Processes that hold the data, 1..256."})
    capacity_mb: int = field(
        default=1024,
        metadata={
            "help": "MiB the whole plane may hold, split evenly over its storage units; memory is taken when used."
        },
    )
    segment_mb: int = field(
        default=16, metadata={"help": "MiB of memory a storage unit touches ahead of need, in one step."}
    )
    timeout_s: float = field(
        default=60.0, metadata={"help": "Seconds a call on the plane may take where the caller names no deadline."}
    )

    backend: str = field(
        default="simple",
        metadata={
            "help": "Where the bytes lie: simple (shared memory of storage units), memory (threads of this process), ray, mooncake, or what "
            "another package offers."
        },
    )
    backend_address: str = field(
        default="",
        metadata={
            "help": "Where the backend is: a Ray cluster (empty: the one Ray finds), host:port of mooncake_master."
        },
    )
    listen: str = field(
        default="",
        metadata={
            "help": "Address of this host to serve clients of other hosts at, host, host:port or [IPv6]:port: with a port, that one and those "
            "after it; beyond loopback it needs a key (RL_TQ_KEY_FILE). Empty: only this host, over unix sockets."
        },
    )
    shared_memory: bool = field(
        default=True,
        metadata={"help": "Clients on the plane's host share its memory; off: they use the network too (for tests)."},
    )

    def __post_init__(self) -> None:
        if not 1 <= self.num_storage_units <= 256:
            raise ConfigError(f"transfer_queue.num_storage_units must be in 1..256; got {self.num_storage_units}.")
        if self.capacity_mb < self.num_storage_units:
            raise ConfigError(
                f"transfer_queue.capacity_mb must be at least 1 MiB for each of the {self.num_storage_units} storage units; "
                f"got {self.capacity_mb}."
            )
        if self.segment_mb < 1:
            raise ConfigError(f"transfer_queue.segment_mb must be at least 1; got {self.segment_mb}.")
        if not 0 < self.timeout_s < float("inf"):
            raise ConfigError(f"transfer_queue.timeout_s must be a positive number of seconds; got {self.timeout_s}.")
        if not self.shared_memory and not self.listen:
            raise ConfigError(
                "transfer_queue.shared_memory=false leaves clients no way in: set transfer_queue.listen, such as 127.0.0.1."
            )

    @property
    def unit_bytes(self) -> int:
        """Bytes one storage unit may hold: the largest block there can be."""
        return (self.capacity_mb << 20) // self.num_storage_units // 4096 * 4096
