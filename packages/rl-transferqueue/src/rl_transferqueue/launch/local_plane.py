"""Start a plane on this host: one controller and the storage units as child processes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from rl_protocol.support.host_identity import this_host
from rl_protocol.support.options import require
from rl_transferqueue.backends import BUILT_IN, check_backend
from rl_transferqueue.client.client import connect
from rl_transferqueue.client.deadline import deadline_after
from rl_transferqueue.config import TransferQueueConfig
from rl_transferqueue.journal.disk_journal import check_journal
from rl_transferqueue.launch.server_children import (
    ServerChild,
    private_dir,
    spawn,
    stop,
    unit_address,
    unit_specs,
    wait_ready,
)
from rl_transferqueue.launch.server_specs import ControllerSpec, Ready, Recovery, UnitSpec, heartbeat_file
from rl_transferqueue.launch.server_threads import ServerThreads
from rl_transferqueue.transport.addresses import check_ports, listen_address
from rl_transferqueue.transport.plane_secret import load_key
from rl_transferqueue.transport.unix_link import socket_path
from rl_transferqueue.wire.descriptor import (
    DESCRIPTOR_FILE,
    ControllerAddress,
    PlaneDescriptor,
    UnitAddress,
)


class LocalPlane:
    """The processes of one plane, started by `start_local_plane`.

    Lifecycle: it runs until `close`, or the end of the `with` block, or the end of this process.
    All data ends with it, unless `TransferQueueConfig.durability` is on: then the next plane with
    the same `journal_dir` has all acknowledged rows, and no task has consumed them.

    Attributes:
        settings: its configuration.
        recovery: what it found in its journal; None without a journal.
    """

    def __init__(
        self,
        settings: TransferQueueConfig,
        descriptor: PlaneDescriptor,
        servers: list[ServerChild] | ServerThreads,
        runtime_dir: Path,
        resources: contextlib.ExitStack,
        recovery: Recovery | None,
    ) -> None:
        self.settings = settings
        self._descriptor = descriptor
        self.recovery = recovery
        self._servers = servers
        self._runtime_dir = runtime_dir
        self._resources = resources

    @property
    def descriptor(self) -> PlaneDescriptor:
        """What a process needs to `connect`."""
        return self._descriptor

    def join(self, units: Sequence[UnitAddress]) -> None:
        """Add the storage units of another host (`start_host_units`), before clients connect: those
        that are connected don't know them.

        Raises:
            BatchError: the plane has a journal or does not listen, or there are more units than it
                was started for, or of another size.
            DataPlaneError: a unit can't be reached, or has another key.
        """

        async def say() -> None:
            async with await connect(self._descriptor) as client:
                await client.join_units(units)

        asyncio.run(say())
        self._descriptor = msgspec.structs.replace(self._descriptor, units=(*self._descriptor.units, *units))
        self._descriptor.save(self._runtime_dir / DESCRIPTOR_FILE)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids: the controller's, then those of the storage units of this host."""
        if isinstance(self._servers, ServerThreads):
            return tuple(said.process.pid for said in self._servers.ready)
        return tuple(child.process.pid for child in self._servers)

    @property
    def heartbeats(self) -> Mapping[int, Path]:
        """Process id -> file of its heartbeat (`rl_protocol.support.heartbeat`), in the order of
        `pids`; empty if the servers are threads."""
        threads = isinstance(self._servers, ServerThreads)
        return {} if threads else {pid: heartbeat_file(self._runtime_dir, pid) for pid in self.pids}

    def close(self) -> None:
        """End the plane, within 3 seconds; safe to call twice."""
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_plane(config: TransferQueueConfig) -> None:
    """Check what `start_local_plane` would refuse, without starting anything.

    Raises:
        ConfigError: the backend is unknown; the address to listen on can't be used or needs a key;
            or one of its ports is in use; the journal's folder is on a network file system or in
            use.
    """
    check_backend(config.backend)
    if config.durability != "off" and config.journal_dir:
        check_journal(Path(config.journal_dir))
    if config.listen:
        check_ports(config.listen, listen_address(config.listen, load_key()), 2 + config.num_storage_units)


def start_local_plane(
    config: TransferQueueConfig,
    runtime_dir: Path | None = None,
    *,
    log_dir: Path | None = None,
    start_timeout_s: float = 30.0,
    hosts: int = 1,
) -> LocalPlane:
    """Start a plane and wait until it serves.

    Args:
        config: sizes and deadlines.
        runtime_dir: existing directory for a private directory with the sockets; default: the
            system's temporary directory. The path of a unix socket has at most 107 bytes.
        log_dir: directory for one log file per process, created if missing; default: beside the
            sockets, removed with them.
        start_timeout_s: deadline for all processes to be ready.
        hosts: of the plane at most; the units of the others `join`.

    Raises:
        ConfigError: `runtime_dir` is missing or its path too long; the address to listen on can't
            be used or needs a key; the backend is unknown; the journal can't be used.
        PlaneLostError: a process ended or was not ready in time; the message has the end of its
            log.
    """
    check_plane(config)
    require(
        config.durability == "off" or bool(config.journal_dir),
        "TransferQueueConfig.journal_dir",
        f"a folder with durability={config.durability}",
        config.journal_dir,
    )
    children: list[ServerChild] = []
    with contextlib.ExitStack() as undo:
        private = undo.enter_context(private_dir(runtime_dir))
        if config.backend == "memory":
            controller, units = _specs(config, private, hosts)
            threads = ServerThreads(private.name, controller, units)
            undo.callback(threads.close)
            descriptor = _descriptor(config, controller, units, threads.ready)
            return LocalPlane(config, descriptor, threads, private, undo.pop_all(), threads.ready[0].recovery)
        undo.callback(stop, children)
        logs = log_dir or private
        logs.mkdir(parents=True, exist_ok=True)
        controller, units = _specs(config, private, hosts)
        deadline = deadline_after(start_timeout_s)
        for name, spec in (("controller", controller), *((f"unit-{unit.index}", unit) for unit in units)):
            children.append(spawn(name, spec, private, logs))
        rest = [wait_ready(child, deadline, start_timeout_s) for child in children[1:]]
        first = wait_ready(children[0], deadline, start_timeout_s)
        descriptor = _descriptor(config, controller, units, [first, *rest])
        descriptor.save(private / DESCRIPTOR_FILE)  # for `find_plane`
        return LocalPlane(config, descriptor, children, private, undo.pop_all(), first.recovery)


def _descriptor(
    config: TransferQueueConfig, controller: ControllerSpec, units: list[UnitSpec], ready: list[Ready]
) -> PlaneDescriptor:
    first, *rest = ready
    return PlaneDescriptor(
        ControllerAddress(
            controller.address, first.process, first.memory_fd, first.memory_bytes, first.control, first.bulk
        ),
        tuple(unit_address(spec, said) for spec, said in zip(units, rest, strict=True)),
        this_host(),
        config.shared_memory,
        units[0].plane,
        config.backend,
        config.backend_address,
        config.timeout_s,
        config.read_cache_mb,
    )


def _specs(config: TransferQueueConfig, private: Path, hosts: int) -> tuple[ControllerSpec, list[UnitSpec]]:
    host, port = listen_address(config.listen, load_key()) if config.listen else ("", 0)
    units = unit_specs(config, private, host, [port and port + 2 + i for i in range(config.num_storage_units)])
    controller = ControllerSpec(
        address=socket_path(private, "c"),
        units=tuple(unit.address for unit in units),
        unit_bytes=config.unit_bytes,
        segment=config.segment_mb << 20,
        hosts=hosts,
        stored=config.backend not in BUILT_IN,
        journal=config.journal_dir if config.durability != "off" else "",
        every_put=config.durability == "every_put",
        listen=host,
        port=port,
    )
    return controller, units
