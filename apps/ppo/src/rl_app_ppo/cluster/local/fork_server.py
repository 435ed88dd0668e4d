"""The driver's end of `worker_template`. Imports no Ray, since the template starts before it."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_PROGRAM = "rl_app_ppo.cluster.local.worker_template"
_STOP_S = 5.0


class ForkServer:
    """The process from which the workers of a run are forked.

    Lifecycle: from its creation on it imports the modules; `listen` makes it serve; `close` ends
    it. It also ends with this process. It inherits the environment; that of a worker is the
    raylet's.

    Args:
        modules: what it imports. It ends if it can't; workers then start by themselves, and the one
            that needs the module raises the error.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self._serves = False
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _PROGRAM, *modules],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in a terminal is for the driver
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

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
