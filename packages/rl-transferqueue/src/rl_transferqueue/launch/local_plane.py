"""Start a plane on this host: one controller and the storage units as child processes."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from rl_protocol.errors import ConfigError, PlaneLostError
from rl_protocol.support.host_identity import this_host
from rl_protocol.support.options import require
from rl_protocol.support.temporary_folders import owned_folder
from rl_transferqueue.backends import BUILT_IN, check_backend
from rl_transferqueue.client.deadline import deadline_after, seconds_until
from rl_transferqueue.config import TransferQueueConfig
from rl_transferqueue.journal.disk_journal import check_journal
from rl_transferqueue.launch.server_specs import ControllerSpec, Ready, Recovery, ServeConfig, UnitSpec
from rl_transferqueue.launch.server_threads import ServerThreads
from rl_transferqueue.transport.addresses import check_ports, listen_address
from rl_transferqueue.transport.plane_secret import load_key
from rl_transferqueue.transport.unix_link import socket_path
from rl_transferqueue.wire.descriptor import (
    DESCRIPTOR_FILE,
    RUNTIME_PREFIX,
    ControllerAddress,
    PlaneDescriptor,
    UnitAddress,
)
from rl_transferqueue.wire.process_liveness import this_process

_SOCKET_PATH_LIMIT = 107
_TAIL_BYTES = 2000
_STOP_S = 1.0
"""Seconds a child has to end by itself, again after SIGTERM, and again after SIGKILL."""


@dataclass(frozen=True, slots=True)
class _Child:
    name: str
    process: subprocess.Popen[bytes]
    ready_fd: int
    log_file: Path

    def tail(self) -> str:
        """The end of what it wrote to stdout and stderr."""
        try:
            return self.log_file.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip()
        except FileNotFoundError:
            return ""


class LocalPlane:
    """The processes of one plane, started by `start_local_plane`.

    Lifecycle: it runs until `close`, or the end of the `with` block, or the end of this process.
    All data ends with it, unless `TransferQueueConfig.durability` is on: then the next plane with
    the same `journal_dir` has all acknowledged rows, and no task has consumed them.

    Attributes:
        recovery: what it found in its journal; None without a journal.
    """

    def __init__(
        self,
        descriptor: PlaneDescriptor,
        servers: list[_Child] | ServerThreads,
        runtime_dir: Path,
        lock: int,
        recovery: Recovery | None,
    ) -> None:
        self._descriptor = descriptor
        self.recovery = recovery
        self._servers = servers
        self._runtime_dir = runtime_dir
        self._lock: int | None = lock

    @property
    def descriptor(self) -> PlaneDescriptor:
        """What a process needs to `connect`."""
        return self._descriptor

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids: the controller's, then the storage units'."""
        if isinstance(self._servers, ServerThreads):
            return tuple(said.process.pid for said in self._servers.ready)
        return tuple(child.process.pid for child in self._servers)

    def close(self) -> None:
        """End the plane, within 3 seconds; safe to call twice."""
        if isinstance(self._servers, ServerThreads):
            self._servers.close()
        else:
            _stop(self._servers)
        shutil.rmtree(self._runtime_dir, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

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
) -> LocalPlane:
    """Start a plane and wait until it serves.

    Args:
        config: sizes and deadlines.
        runtime_dir: existing directory for a private directory with the sockets; default: the
            system's temporary directory. The path of a unix socket has at most 107 bytes.
        log_dir: directory for one log file per process, created if missing; default: beside the
            sockets, removed with them.
        start_timeout_s: deadline for all processes to be ready.

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
    private, lock = _private_dir(runtime_dir)
    children: list[_Child] = []
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, lock)
        undo.callback(shutil.rmtree, private, ignore_errors=True)
        if config.backend == "memory":
            controller, units = _specs(config, private)
            threads = ServerThreads(private.name, controller, units)
            undo.pop_all()
            descriptor = _descriptor(config, controller, units, threads.ready)
            return LocalPlane(descriptor, threads, private, lock, threads.ready[0].recovery)
        undo.callback(lambda: _stop(children))
        logs = log_dir or private
        logs.mkdir(parents=True, exist_ok=True)
        controller, units = _specs(config, private)
        deadline = deadline_after(start_timeout_s)
        for name, spec in (("controller", controller), *((f"unit-{unit.index}", unit) for unit in units)):
            children.append(_spawn(name, spec, private, logs))
        rest = [_wait_ready(child, deadline, start_timeout_s) for child in children[1:]]
        first = _wait_ready(children[0], deadline, start_timeout_s)
        descriptor = _descriptor(config, controller, units, [first, *rest])
        descriptor.save(private / DESCRIPTOR_FILE)  # for `find_plane`
        undo.pop_all()
    return LocalPlane(descriptor, children, private, lock, first.recovery)


def _descriptor(
    config: TransferQueueConfig, controller: ControllerSpec, units: list[UnitSpec], ready: list[Ready]
) -> PlaneDescriptor:
    first, *rest = ready
    return PlaneDescriptor(
        ControllerAddress(
            controller.address, first.process, first.memory_fd, first.memory_bytes, first.control, first.bulk
        ),
        tuple(
            UnitAddress(spec.address, said.process, said.memory_fd, said.memory_bytes, said.bulk)
            for spec, said in zip(units, rest, strict=True)
        ),
        this_host(),
        config.shared_memory,
        units[0].plane,
        config.backend,
        config.backend_address,
        config.timeout_s,
        config.read_cache_mb,
    )


def _specs(config: TransferQueueConfig, private: Path) -> tuple[ControllerSpec, list[UnitSpec]]:
    host, port = listen_address(config.listen, load_key()) if config.listen else ("", 0)
    units = [
        UnitSpec(
            index=i,
            address=socket_path(private, f"u{i}"),
            capacity=config.unit_bytes,
            segment=config.segment_mb << 20,
            plane=private.name,
            backend=config.backend,
            backend_address=config.backend_address,
            listen=host,
            port=port and port + 2 + i,
        )
        for i in range(config.num_storage_units)
    ]
    controller = ControllerSpec(
        address=socket_path(private, "c"),
        units=tuple(unit.address for unit in units),
        unit_bytes=config.unit_bytes,
        segment=config.segment_mb << 20,
        stored=config.backend not in BUILT_IN,
        journal=config.journal_dir if config.durability != "off" else "",
        every_put=config.durability == "every_put",
        listen=host,
        port=port,
    )
    return controller, units


def _private_dir(base: Path | None) -> tuple[Path, int]:
    """A directory for sockets, and its lock; directories left behind by killed planes are
    removed."""
    parent = Path(tempfile.gettempdir()) if base is None else base.absolute()
    if not parent.is_dir():
        raise ConfigError(f"The runtime directory {parent} is not there; make it first.")
    if len(os.fsencode(parent / f"{RUNTIME_PREFIX}12345678" / "u255")) > _SOCKET_PATH_LIMIT:
        raise ConfigError(
            f"The runtime directory {parent} has too long a path for unix sockets ({_SOCKET_PATH_LIMIT} bytes at most); give a shorter "
            "runtime_dir or set TMPDIR."
        )
    return owned_folder(RUNTIME_PREFIX, parent)


def _spawn(name: str, spec: ControllerSpec | UnitSpec, private: Path, logs: Path) -> _Child:
    log_file = logs / f"{name}.log"
    ready, ready_write = os.pipe()
    told = ServeConfig(spec, this_process(), ready_write, str(private))
    command = [sys.executable, "-m", "rl_transferqueue.launch.server_process", msgspec.json.encode(told).decode()]
    try:
        with log_file.open("ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=(ready_write,), start_new_session=True
            )
    except BaseException:
        os.close(ready)
        raise
    finally:
        os.close(ready_write)
    return _Child(name, process, ready, log_file)


def _wait_ready(child: _Child, deadline: float, timeout_s: float) -> Ready:
    readable, _, _ = select.select([child.ready_fd], [], [], seconds_until(deadline))
    said = os.read(child.ready_fd, 4096) if readable else b""
    if said:
        return msgspec.json.decode(said, type=Ready)
    what = f"was not up within {timeout_s:g} s"
    if readable:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(_STOP_S)
        what = f"ended with status {child.process.returncode} before it was up"
    raise PlaneLostError(f"The {child.name} process of the data plane {what}. It wrote:\n{child.tail() or '(nothing)'}")


def _stop(children: list[_Child]) -> None:
    for child in children:
        assert child.process.stdin is not None
        child.process.stdin.close()
    for end in (None, subprocess.Popen[bytes].terminate, subprocess.Popen[bytes].kill):
        deadline = deadline_after(_STOP_S)
        for child in children:
            if end is not None and child.process.poll() is None:
                end(child.process)
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(seconds_until(deadline))
    for child in children:
        with contextlib.suppress(OSError):
            os.close(child.ready_fd)
    children.clear()
