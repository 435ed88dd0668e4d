"""Entry point of a server process: `python -m rl_transferqueue.launch.server_process CONFIG`.

CONFIG is a `ServeConfig` as JSON. The process writes a `Ready` to the pipe `ready_fd` once it
serves. It ends when its stdin is closed or its parent ends, and then removes the runtime directory,
since a killed parent can't.
"""

from __future__ import annotations

import gc
import logging
import os
import resource
import shutil
import sys
from typing import TypeAlias

import msgspec
import zmq

from rl_protocol.errors import ConfigError, PlaneLostError, RLError
from rl_protocol.support.heartbeat import beat
from rl_protocol.support.host.portable import uses_linux
from rl_protocol.support.stack_dumps import dump_at_signal
from rl_transferqueue.backends import BUILT_IN, Share
from rl_transferqueue.controller.controller import Controller
from rl_transferqueue.controller.controller_spec import ControllerSpec
from rl_transferqueue.launch.server_specs import (
    Ready,
    Recovery,
    ServeConfig,
    UnitSpec,
    heartbeat_file,
)
from rl_transferqueue.storage.backend_unit import BackendUnit
from rl_transferqueue.storage.storage_unit import StorageUnit
from rl_transferqueue.transport.addresses import Endpoints, listen_address
from rl_transferqueue.transport.plane_secret import load_key
from rl_transferqueue.wire.process_liveness import open_pidfd, this_process

log = logging.getLogger(__name__)


Role: TypeAlias = Controller | StorageUnit | BackendUnit


def main(arguments: list[str]) -> int:
    """Serve until stdin is closed or the parent ends; returns the exit status."""
    # A full collection would visit every row and find no garbage.
    gc.set_threshold(50_000, 20, 1_000_000)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    dump_at_signal()
    _raise_file_limit()
    config = msgspec.json.decode(arguments[0], type=ServeConfig)
    try:
        _serve(config)
    except RLError as error:
        log.error("%s", error)
        return 1
    return 0


def _raise_file_limit() -> None:
    """Open as many files as this process may: each client takes two, and the limit of shells is
    1024."""
    if uses_linux():  # macOS refuses its own hard limit
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _serve(config: ServeConfig) -> None:
    beat(heartbeat_file(config.runtime_dir, os.getpid()))
    role = build(config.spec)
    try:
        parent = open_pidfd(config.parent, "The parent")
    except PlaneLostError:
        log.warning("the parent was gone before this process was up")
    else:
        for fd in (sys.stdin.fileno(), parent):
            role.reactor.watch(fd, role.reactor.stop)
        endpoints = listen(role, config.spec)
        role.when_ready(lambda: _say(config.ready_fd, ready(role, endpoints)))
        log.info("serving %s", config.spec)
        role.reactor.run()
        os.close(parent)
    role.close()
    shutil.rmtree(config.runtime_dir, ignore_errors=True)


def build(spec: UnitSpec | ControllerSpec) -> Role:
    """The server, bound to its socket."""
    if isinstance(spec, UnitSpec):
        if spec.backend not in BUILT_IN:
            share = Share(spec.plane, spec.index, spec.capacity, spec.backend_address)
            return BackendUnit(spec.address, spec.backend, share)
        return StorageUnit(spec.address, spec.capacity, spec.segment, joins=spec.joins)
    return Controller(spec)


def listen(role: Role, spec: UnitSpec | ControllerSpec) -> Endpoints:
    """Have it serve clients of other hosts, too; without a host do nothing.

    Raises:
        ConfigError: the host needs a key, or a port can't be used.
    """
    if not spec.listen:
        return Endpoints()
    key = load_key()
    host = listen_address(spec.listen, key).host
    try:
        if isinstance(role, Controller):
            assert isinstance(spec, ControllerSpec)
            return role.listen(host, key, spec.port, spec.bulk_port)
        return role.listen(host, key, spec.port)
    except (OSError, zmq.ZMQError) as error:
        ports = (spec.port, spec.bulk_port) if isinstance(spec, ControllerSpec) else (spec.port,)
        raise ConfigError(f"A server of the data plane can't listen at {host}, ports {ports}: {error}.") from error


def ready(role: Role, endpoints: Endpoints) -> Ready:
    """What clients need to know of it."""
    arenas = role.arenas if isinstance(role, Controller) else ()
    return Ready(this_process(), *role.shared_memory, *endpoints, _recovery(role), arenas)


def _recovery(role: Role) -> Recovery | None:
    report = role.recovery if isinstance(role, Controller) else None
    if report is None:
        return None
    return Recovery(report.rows_kept, len(report.rows_incomplete), report.bytes_cut, report.segments_removed)


def _say(fd: int, what: Ready) -> None:
    os.write(fd, msgspec.json.encode(what))
    os.close(fd)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
