"""Server processes of a plane as children of this process, and the folder of their sockets."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rl_protocol.errors import ConfigError, PlaneLostError
from rl_protocol.support.host.portable import SOCKET_PATH_LIMIT
from rl_protocol.support.host_identity import this_host
from rl_protocol.support.temporary_folders import temporary_folder
from rl_transferqueue.client.deadline import deadline_after, seconds_until
from rl_transferqueue.config import TransferQueueConfig
from rl_transferqueue.controller.controller_spec import ControllerSpec
from rl_transferqueue.launch.server_specs import Ready, ServeConfig, UnitSpec
from rl_transferqueue.transport.unix_link import socket_path
from rl_transferqueue.wire.descriptor import RUNTIME_PREFIX, UnitAddress
from rl_transferqueue.wire.process_liveness import this_process

_TAIL_BYTES = 2000
_STOP_S = 1.0
"""Seconds a child has to end by itself, again after SIGTERM, and again after SIGKILL."""


@dataclass(frozen=True, slots=True)
class ServerChild:
    """A server process that this process has started."""

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


def unit_specs(
    config: TransferQueueConfig, private: Path, host: str, ports: Sequence[int], *, joins: bool = False
) -> list[UnitSpec]:
    """The storage units of one host, which listen at a numeric address and these ports."""
    return [
        UnitSpec(
            index=i,
            address=socket_path(private, f"u{i}"),
            capacity=config.unit_bytes,
            segment=config.segment_mb << 20,
            plane=private.name,
            backend=config.backend,
            backend_address=config.backend_address,
            listen=host,
            port=port,
            joins=joins,
        )
        for i, port in enumerate(ports)
    ]


def unit_address(spec: UnitSpec, said: Ready) -> UnitAddress:
    """Where a unit that is ready is."""
    return UnitAddress(
        spec.address, said.process, said.memory_fd, said.memory_bytes, said.bulk, this_host(), said.control
    )


def private_dir(base: str | Path | None) -> AbstractContextManager[Path]:
    """A directory for sockets, removed on exit; directories left behind by killed planes are
    removed first."""
    parent = Path(tempfile.gettempdir()) if base is None else Path(base).absolute()
    if not parent.is_dir():
        raise ConfigError(f"The runtime directory {parent} is not there; make it first.")
    if len(os.fsencode(parent / f"{RUNTIME_PREFIX}12345678" / "u255")) > SOCKET_PATH_LIMIT:
        given = "temporary folder (TMPDIR)" if base is None else "runtime directory"
        raise ConfigError(
            f"The {given} {parent} has too long a path for Unix sockets, which have at most {SOCKET_PATH_LIMIT} bytes; set TMPDIR to a "
            "folder with a shorter one, or give runtime_dir."
        )
    return temporary_folder(RUNTIME_PREFIX, parent)


def spawn(name: str, spec: ControllerSpec | UnitSpec, private: Path, logs: Path) -> ServerChild:
    """Start a server process, which logs to NAME.log."""
    log_file = logs / f"{name}.log"
    ready, ready_write = os.pipe()
    told = ServeConfig(spec, this_process(), ready_write, str(private))
    command = [sys.executable, "-m", "rl_transferqueue.launch.server_process", msgspec.json.encode(told).decode()]
    try:
        with log_file.open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=os.environ.copy(),  # another thread may set a variable, which moves the memory of all
                pass_fds=(ready_write,),
                start_new_session=True,
            )
    except BaseException:
        os.close(ready)
        raise
    finally:
        os.close(ready_write)
    return ServerChild(name, process, ready, log_file)


def wait_ready(child: ServerChild, deadline: float, timeout_s: float) -> Ready:
    """Wait until it serves.

    Raises:
        PlaneLostError: it has ended, or the deadline has passed, `timeout_s` after the start.
    """
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


def kill(child: ServerChild, timeout_s: float) -> None:
    """End a server process at once, also a stopped one; it removes nothing.

    Raises:
        PlaneLostError: it has not ended within `timeout_s` seconds.
    """
    child.process.kill()
    try:
        child.process.wait(timeout_s)
    except subprocess.TimeoutExpired as error:
        raise PlaneLostError(
            f"The {child.name} process of the data plane does not end within {timeout_s:g} s."
        ) from error


def release(child: ServerChild) -> None:
    """Close the pipes of a server process that has ended."""
    assert child.process.stdin is not None
    child.process.stdin.close()
    os.close(child.ready_fd)


def stop(children: list[ServerChild]) -> None:
    """End them, within 3 seconds, and empty the list."""
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
