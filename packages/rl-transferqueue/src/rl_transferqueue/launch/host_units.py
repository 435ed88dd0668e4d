"""Start the storage units of another host than the controller's, which join its plane."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from rl_protocol.support.options import require
from rl_transferqueue.client.deadline import deadline_after
from rl_transferqueue.config import TransferQueueConfig
from rl_transferqueue.launch.server_children import (
    ServerChild,
    private_dir,
    spawn,
    stop,
    unit_address,
    unit_specs,
    wait_ready,
)
from rl_transferqueue.launch.server_specs import heartbeat_file
from rl_transferqueue.transport.addresses import check_ports, listen_address
from rl_transferqueue.transport.plane_secret import load_key
from rl_transferqueue.wire.descriptor import UnitAddress


class HostUnits:
    """The storage units of one host, started by `start_host_units`.

    Lifecycle: they run until `close`, or the end of the `with` block, or the end of this process.

    Attributes:
        addresses: for `LocalPlane.join`.
    """

    def __init__(
        self,
        addresses: tuple[UnitAddress, ...],
        children: list[ServerChild],
        runtime_dir: Path,
        resources: contextlib.ExitStack,
    ) -> None:
        self.addresses = addresses
        self._children = children
        self._runtime_dir = runtime_dir
        self._resources = resources

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the units."""
        return tuple(child.process.pid for child in self._children)

    @property
    def heartbeats(self) -> Mapping[int, Path]:
        """Process id -> file of its heartbeat (`rl_protocol.support.heartbeat`), in the order of
        `pids`."""
        return {pid: heartbeat_file(self._runtime_dir, pid) for pid in self.pids}

    def close(self) -> None:
        """End the units, within 3 seconds; safe to call twice."""
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def start_host_units(
    config: TransferQueueConfig,
    runtime_dir: str | Path | None = None,
    *,
    log_dir: str | Path | None = None,
    start_timeout_s: float = 30.0,
) -> HostUnits:
    """Start storage units on this host, and wait until they serve.

    The plane does not know them before `LocalPlane.join`, on the host of its controller. Clients on
    this host then put rows into them, and read those rows in shared memory.

    Args:
        config: that of the plane, with an address of this host in `listen`, and each unit's two
            ports from its port on.
        runtime_dir: see `start_local_plane`.
        log_dir: folder of the units' logs, likewise.
        start_timeout_s: longest wait until all units serve, seconds.

    Raises:
        ConfigError: the address can't be used or needs a key; the backend is not `simple`; or
            `runtime_dir` is missing or its path too long.
        PlaneLostError: a unit ended or was not ready in time; the message has the end of its log.
    """
    require(config.backend == "simple", "TransferQueueConfig.backend", "simple for units that join", config.backend)
    require(bool(config.listen), "TransferQueueConfig.listen", "an address of this host for units that join", "")
    address = listen_address(config.listen, load_key())
    check_ports(config.listen, address, 2 * config.num_storage_units)
    children: list[ServerChild] = []
    with contextlib.ExitStack() as undo:
        private = undo.enter_context(private_dir(runtime_dir))
        undo.callback(stop, children)
        logs = Path(log_dir or private)
        logs.mkdir(parents=True, exist_ok=True)
        ports = [address.port and address.port + 2 * i for i in range(config.num_storage_units)]
        specs = unit_specs(config, private, address.host, ports, joins=True)
        deadline = deadline_after(start_timeout_s)
        children += [spawn(f"unit-{spec.index}", spec, private, logs) for spec in specs]
        ready = [wait_ready(child, deadline, start_timeout_s) for child in children]
        addresses = tuple(unit_address(spec, said) for spec, said in zip(specs, ready, strict=True))
        return HostUnits(addresses, children, private, undo.pop_all())
