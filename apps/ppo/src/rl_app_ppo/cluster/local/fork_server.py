"""The driver's end of `worker_template`. Imports no Ray, since the template starts before it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

_PROGRAM = "rl_app_ppo.cluster.local.worker_template"
_OF_ALL_RUNS = ("torch",)
_STOP_S = 5.0


class ForkServer:
    """The process from which the workers of a run are forked.

    Lifecycle: from its creation on it imports; `prepare` names more modules, `listen` makes it
    serve; `close` ends it. It also ends with this process. A worker has the environment of the
    raylet, but libraries that read a variable when they are imported have read that of this one.

    Args:
        settings: variables of its environment, besides those of this process.
        modules: what it imports first.
    """

    def __init__(self, settings: Mapping[str, str], modules: Sequence[str] = ()) -> None:
        self.settings = dict(settings)
        self._serves = False
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _PROGRAM, *modules],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **settings},
                start_new_session=True,  # Ctrl-C in a terminal is for the driver
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def prepare(self, modules: Sequence[str]) -> None:
        """Have it import these modules, too. Call it once.

        It ends if it can't; workers then start by themselves, and the one that needs the module
        raises the error.
        """
        if self._process.poll() is None:
            self._control.sendall(json.dumps([*modules]).encode() + b"\n")

    def listen(self, path: Path) -> None:
        """Serve the requests at a new unix socket."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as requests:
            requests.bind(str(path))
            requests.listen()
            if self._process.poll() is None:
                socket.send_fds(self._control, [b"\0"], [requests.fileno()])
                self._serves = True

    def close(self) -> None:
        """End the process and the workers that still run; safe to call twice."""
        if not self._serves:  # as after a refused configuration, for which its imports would be waited for
            self._process.kill()
        self._control.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:  # it is still importing
            self._process.kill()
            self._process.wait()


_early: list[ForkServer] = []
"""The one that `started_early` has started, until a run uses it."""


@contextmanager
def started_early(settings: Mapping[str, str]) -> Generator[None]:
    """Start the process while the command is imported; `fork_server` returns it.

    It imports what every run needs. It ends with the block if no run has used it.
    """
    _early.append(ForkServer(settings, _OF_ALL_RUNS))
    try:
        yield
    finally:
        close_early()


def close_early() -> None:
    """End what `started_early` has started, unless a run uses it."""
    while _early:
        _early.pop().close()


def fork_server(settings: Mapping[str, str], modules: Sequence[str]) -> ForkServer:
    """The process that was started early, if it has these settings, or a new one.

    Args:
        settings: see ForkServer.
        modules: what it imports.
    """
    if _early and _early[0].settings != settings:
        close_early()
    server = _early.pop() if _early else ForkServer(settings)
    server.prepare(modules)
    return server
