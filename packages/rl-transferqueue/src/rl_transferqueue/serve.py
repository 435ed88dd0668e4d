"""Entry point of the server processes of a plane: `python -m rl_transferqueue.serve <ServeConfig as JSON>`.

The process says on the pipe `ready_fd` that it is up. It ends when stdin ends or its parent does, whichever is noticed first, and then
removes the runtime directory: the parent may not be there to do it.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
import sys
from typing import TypeAlias

import msgspec

from rl_protocol.errors import PlaneLostError
from rl_transferqueue.controller import Controller
from rl_transferqueue.hosts import Endpoints, listen_address
from rl_transferqueue.keys import load_key
from rl_transferqueue.liveness import ProcessId, open_pidfd, this_process
from rl_transferqueue.storage import StorageUnit

log = logging.getLogger(__name__)


class UnitSpec(msgspec.Struct, frozen=True, tag=True):
    """Serve a storage unit; sizes in bytes."""

    index: int
    address: str
    capacity: int
    segment: int
    listen: str = ""
    """Numeric address for clients of other hosts; empty: none."""


class ControllerSpec(msgspec.Struct, frozen=True, tag=True):
    """Serve the controller; `unit_bytes` is the capacity of every unit."""

    address: str
    units: tuple[str, ...]
    unit_bytes: int
    segment: int
    listen: str = ""
    """See UnitSpec."""


class ServeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a server process is told on its command line."""

    spec: UnitSpec | ControllerSpec
    parent: ProcessId
    ready_fd: int
    runtime_dir: str


class Ready(msgspec.Struct, frozen=True):
    """What it says on the pipe once it serves."""

    process: ProcessId
    memory_fd: int
    """What clients map: a unit's arena, the controller's board."""
    memory_bytes: int
    control: str = ""
    """See ControllerAddress."""
    bulk: str = ""


Role: TypeAlias = Controller | StorageUnit


def main(arguments: list[str]) -> int:
    """Serve until stdin or the parent ends; the exit status."""
    gc.set_threshold(50_000, 20, 1_000_000)  # a full collection would look at every row there is, and finds no garbage
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    config = msgspec.json.decode(arguments[0], type=ServeConfig)
    role = _build(config.spec)
    try:
        parent = open_pidfd(config.parent, "The parent")
    except PlaneLostError:
        log.warning("the parent was gone before this process was up")
    else:
        for fd in (sys.stdin.fileno(), parent):
            role.reactor.watch(fd, role.reactor.stop)
        endpoints = _listen(role, config.spec.listen)
        role.when_ready(lambda: _say_ready(config.ready_fd, role, endpoints))
        log.info("serving %s", config.spec)
        role.reactor.run()
        os.close(parent)
    role.close()
    shutil.rmtree(config.runtime_dir, ignore_errors=True)
    return 0


def _build(spec: UnitSpec | ControllerSpec) -> Role:
    if isinstance(spec, UnitSpec):
        return StorageUnit(spec.index, spec.address, spec.capacity, spec.segment)
    return Controller(spec.address, spec.units, spec.unit_bytes, spec.segment)


def _listen(role: Role, host: str) -> Endpoints:
    if not host:
        return Endpoints()
    key = load_key()
    return role.listen(listen_address(host, key), key)


def _say_ready(fd: int, role: Role, endpoints: Endpoints) -> None:
    os.write(fd, msgspec.json.encode(Ready(this_process(), *role.shared_memory, *endpoints)))
    os.close(fd)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
