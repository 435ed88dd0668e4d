"""Start a plane on this host: one controller and the storage units as child processes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import msgspec

from rl_protocol.errors import ConfigError, PlaneLostError
from rl_protocol.support.host_identity import this_host
from rl_protocol.support.options import require
from rl_transferqueue.backends import BUILT_IN, load_backend
from rl_transferqueue.client.client import connect
from rl_transferqueue.client.deadline import deadline_after
from rl_transferqueue.config import TransferQueueConfig
from rl_transferqueue.controller.controller_spec import ControllerSpec
from rl_transferqueue.journal.disk_journal import check_journal
from rl_transferqueue.launch.server_children import (
    ServerChild,
    kill,
    private_dir,
    release,
    spawn,
    stop,
    unit_address,
    unit_specs,
    wait_ready,
)
from rl_transferqueue.launch.server_specs import Ready, Recovery, UnitSpec, heartbeat_file
from rl_transferqueue.launch.server_threads import ServerThreads
from rl_transferqueue.transport.addresses import check_ports, listen_address, split_endpoint
from rl_transferqueue.transport.plane_secret import load_key
from rl_transferqueue.transport.unix_link import connect_unix, socket_path
from rl_transferqueue.wire.descriptor import (
    DESCRIPTOR_FILE,
    ControllerAddress,
    PlaneDescriptor,
    UnitAddress,
)
from rl_transferqueue.wire.messages import CONTROLLER, HangUp, Request, pack

_KILL_S = 5.0


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
        restartable: tuple[ControllerSpec, Path] | None = None,
    ) -> None:
        self.settings = settings
        self._descriptor = descriptor
        self.recovery = recovery
        self._servers = servers
        self._runtime_dir = runtime_dir
        self._resources = resources
        self._restartable = restartable
        self._incarnation = descriptor.controller.incarnation

    @property
    def descriptor(self) -> PlaneDescriptor:
        """What a process needs to `connect`."""
        return self._descriptor

    def join(self, units: Sequence[UnitAddress]) -> None:
        """Add the storage units of another host (`start_host_units`), before clients connect: those
        that are connected don't know them.

        Raises:
            BatchError: the plane does not listen, or there are more units than it was started for,
                or of another size.
            DataPlaneError: a unit can't be reached, or has another key.
        """

        async def say() -> None:
            async with await connect(self._descriptor) as client:
                await client.join_units(units)

        asyncio.run(say())
        self._descriptor = msgspec.structs.replace(self._descriptor, units=(*self._descriptor.units, *units))
        self._descriptor.save(self._runtime_dir / DESCRIPTOR_FILE)

    def restart_controller(self, *, start_timeout_s: float = 30.0) -> Recovery:
        """Start a successor of the controller, which has ended, or does not answer and is killed.

        Clients, also those on other hosts, continue their sessions with it: calls under way return
        or raise as if the controller had been slow, a put is made once, and no row is consumed
        twice. The storage units that run stay. Rows are read from the journal when they are needed,
        and views stay valid. A plane that listens does so at the same ports. Not for several
        threads at once.

        Args:
            start_timeout_s: deadline for the successor to be ready, seconds.

        Returns:
            What it found in the journal.

        Raises:
            ConfigError: the plane was started without `successor_s`.
            PlaneLostError: the controller did not end, or its successor was not ready in time. Try
                again, or close the plane.
        """
        if self._restartable is None or isinstance(self._servers, ServerThreads):
            raise ConfigError(
                "The controller of this plane can't be restarted: start_local_plane needs successor_s above 0, with "
                "TransferQueueConfig.durability=commit or every_put."
            )
        deadline = deadline_after(start_timeout_s)
        spec, logs = self._restartable
        old = self._servers[0]
        kill(old, start_timeout_s)
        self._incarnation += 1
        spec = self._successor_spec(spec)
        self._servers[0] = spawn("controller", spec, self._runtime_dir, logs)
        release(old)
        said = wait_ready(self._servers[0], deadline, start_timeout_s)
        units = tuple(
            msgspec.structs.replace(unit, arena_fd=fd)
            for unit, fd in zip(self._descriptor.units, said.arenas, strict=True)
        )
        controller = _controller_address(spec, said)
        self._descriptor = msgspec.structs.replace(self._descriptor, controller=controller, units=units)
        self._descriptor.save(self._runtime_dir / DESCRIPTOR_FILE)
        assert said.recovery is not None
        self.recovery = said.recovery
        return said.recovery

    def _successor_spec(self, spec: ControllerSpec) -> ControllerSpec:
        assert isinstance(self._servers, list)
        ended = [child.process.poll() is not None for child in self._servers[1:]]
        units = tuple("" if gone else address for address, gone in zip(spec.units, ended, strict=True))
        joined = self._descriptor.units[len(units) :]
        address = socket_path(self._runtime_dir, f"c{self._incarnation}")
        ports = _ports(self._descriptor.controller)
        return msgspec.structs.replace(
            spec,
            address=address,
            units=units,
            joined=joined,
            incarnation=self._incarnation,
            port=ports.control,
            bulk_port=ports.bulk,
        )

    def abandon_controller(self) -> None:
        """Start no successor of the controller, which has ended, or is killed: calls of clients
        raise PlaneLostError.

        Raises:
            PlaneLostError: the controller does not end.
        """
        (self._runtime_dir / DESCRIPTOR_FILE).unlink(missing_ok=True)
        if not isinstance(self._servers, ServerThreads):
            kill(self._servers[0], _KILL_S)
        for unit in self._descriptor.units:
            if unit.bulk:  # clients of other hosts see the end of its connections
                with contextlib.suppress(PlaneLostError):
                    link = connect_unix(unit.address, CONTROLLER, "storage unit")
                    link.send(pack(Request(1, HangUp())))
                    link.close()

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
        ConfigError: the backend is unknown or can't be loaded; the address to listen on can't be
            used or needs a key; or one of its ports is in use; the journal's folder is on a network
            file system or in use.
    """
    if config.backend not in BUILT_IN:
        load_backend(config.backend)
    if config.durability != "off" and config.journal_dir:
        check_journal(Path(config.journal_dir))
    if config.listen:
        check_ports(config.listen, listen_address(config.listen, load_key()), 2 + config.num_storage_units)


def start_local_plane(
    config: TransferQueueConfig,
    runtime_dir: str | Path | None = None,
    *,
    log_dir: str | Path | None = None,
    start_timeout_s: float = 30.0,
    hosts: int = 1,
    successor_s: float = 0.0,
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
        successor_s: seconds that clients wait for `LocalPlane.restart_controller` after the
            controller has ended; 0: they raise PlaneLostError at once. A client that is not back
            so long after its successor serves has lost the rows on their way to it. Above 0 the
            plane needs a journal and the backend `simple`.

    Raises:
        ConfigError: `runtime_dir` is missing or its path too long; the address to listen on can't
            be used or needs a key; the backend is unknown or can't be loaded; the journal can't
            be used.
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
    _check_successor(config, successor_s)
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
        logs = Path(log_dir or private)
        logs.mkdir(parents=True, exist_ok=True)
        controller, units = _specs(config, private, hosts)
        if successor_s:
            consumed = str(private / "consumed.sqlite")
            file = str(private / DESCRIPTOR_FILE)
            controller = msgspec.structs.replace(
                controller, consumed=consumed, descriptor=file, successor_s=successor_s
            )
        deadline = deadline_after(start_timeout_s)
        for name, spec in (("controller", controller), *((f"unit-{unit.index}", unit) for unit in units)):
            children.append(spawn(name, spec, private, logs))
        rest = [wait_ready(child, deadline, start_timeout_s) for child in children[1:]]
        first = wait_ready(children[0], deadline, start_timeout_s)
        descriptor = _descriptor(config, controller, units, [first, *rest])
        descriptor.save(private / DESCRIPTOR_FILE)  # for `find_plane`
        restartable = (controller, logs) if successor_s else None
        return LocalPlane(config, descriptor, children, private, undo.pop_all(), first.recovery, restartable)


def _check_successor(config: TransferQueueConfig, successor_s: float) -> None:
    require(successor_s >= 0, "start_local_plane(successor_s)", "at least 0", successor_s)
    if successor_s:
        why = "where the controller can have a successor (successor_s)"
        require(config.durability != "off", "TransferQueueConfig.durability", f"commit or every_put {why}", "off")
        require(config.backend == "simple", "TransferQueueConfig.backend", f"simple {why}", config.backend)


def _descriptor(
    config: TransferQueueConfig,
    controller: ControllerSpec,
    units: list[UnitSpec],
    ready: list[Ready],
) -> PlaneDescriptor:
    first, *rest = ready
    return PlaneDescriptor(
        _controller_address(controller, first),
        tuple(unit_address(spec, said) for spec, said in zip(units, rest, strict=True)),
        this_host(),
        config.shared_memory,
        units[0].plane,
        config.backend,
        config.backend_address,
        float(config.timeout_s),  # 240 and 240.0 would be two texts
        config.read_cache_mb,
        controller.descriptor,
        controller.successor_s,
    )


def _controller_address(spec: ControllerSpec, said: Ready) -> ControllerAddress:
    return ControllerAddress(
        spec.address, said.process, said.memory_fd, said.memory_bytes, said.control, said.bulk, spec.incarnation
    )


class _Ports(NamedTuple):
    """Ports of a controller for other hosts; 0: it does not listen."""

    control: int
    bulk: int


def _ports(controller: ControllerAddress) -> _Ports:
    return _Ports(*(split_endpoint(where)[1] if where else 0 for where in (controller.control, controller.bulk)))


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
        verify=config.verify,
        listen=host,
        port=port,
        bulk_port=port and port + 1,
    )
    return controller, units
