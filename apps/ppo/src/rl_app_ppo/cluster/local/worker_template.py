"""Program of the process from which the workers of a run are forked.

It starts with the command, and imports what workers need while the driver checks the configuration
and starts Ray. Standard input is a socket, on which it receives the names of modules, as a line of
JSON, and then the socket for requests of `fork_client`; it ends, with its workers, when the driver
closes the other end.

It imports no Ray, which reads variables of a worker when it is loaded.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_app_ppo.cluster.local.fork_client import LENGTH, STANDARD
from rl_app_ppo.garbage_collection import without_gc

_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Request:
    """A worker to fork.

    Attributes:
        command: path and arguments of Ray's worker program.
        environment: its variables.
        descriptors: its standard input, output and error.
        answer: gets a byte once it is forked.
    """

    command: Sequence[str]
    environment: dict[str, str]
    descriptors: Sequence[int]
    answer: socket.socket


def main(first: Sequence[str]) -> None:
    """Import modules; then fork a worker for each request until the driver has ended.

    Args:
        first: the modules to import before others are named.
    """
    control = socket.socket(fileno=os.dup(0))
    with without_gc():
        for name in first:
            importlib.import_module(name)
        for name in _named(control):
            importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel removes workers that have ended
    _, received, _, _ = socket.recv_fds(control, 1, 1)
    if not received:
        return  # the driver has ended
    requests = socket.socket(fileno=received[0])
    while control not in select.select([requests, control], [], [])[0]:
        request = _read(requests)
        if not os.fork():
            control.close()
            requests.close()
            _become_worker(request)
            return
        request.answer.sendall(b"\0")
        request.answer.close()
        for descriptor in request.descriptors:
            os.close(descriptor)
    requests.close()
    _kill_workers()


def _named(control: socket.socket) -> list[str]:
    """The modules that the driver names; it reads no byte of what follows."""
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := control.recv(1)):
            return []  # the driver has ended
        line += byte
    return json.loads(line)


def _kill_workers() -> None:
    """End the workers that have not ended with Ray.

    One that is still starting would notice its end late, after it has made Ray's folder again.
    """
    for pid in map(int, Path("/proc/thread-self/children").read_text().split()):
        os.kill(pid, signal.SIGKILL)  # not reused: only this thread's children can end meanwhile


def _read(requests: socket.socket) -> Request:
    answer, _ = requests.accept()
    answer.settimeout(_TIMEOUT_S)
    head, descriptors, _, _ = socket.recv_fds(answer, LENGTH.size, len(STANDARD))
    with answer.makefile("rb") as body:
        message = json.loads(body.read(*LENGTH.unpack(head)))
    return Request(message["command"], message["environment"], descriptors, answer)


def _become_worker(request: Request) -> None:
    """Run Ray's worker program as this process."""
    os.setpgid(0, 0)  # Ray kills the process group of a worker that has ended
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request.answer.close()
    for descriptor, standard in zip(request.descriptors, STANDARD, strict=True):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request.environment)
    sys.argv = list(request.command)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
