"""The backend `memory`: the servers of a plane as threads of this process. For tests and programs of one process: nothing to start or to kill."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence

import zmq

from rl_protocol.errors import PlaneLostError
from rl_transferqueue.serve import ControllerSpec, Ready, Role, UnitSpec, build, listen, ready

_JOIN_S = 5.0
_lifelines: dict[str, int] = {}
"""Plane -> read end of a pipe that ends with it."""


def lifeline(plane: str) -> int:
    """A file descriptor that becomes readable when the plane ends; the caller closes it.

    Raises:
        PlaneLostError: it has ended, or is of another process.
    """
    if plane not in _lifelines:
        raise PlaneLostError(
            "The data plane has ended, or lives in the memory of another process (transfer_queue.backend=memory)."
        )
    return os.dup(_lifelines[plane])


class ServerThreads:
    """The servers of one plane. Lifecycle: running from the start until `close`."""

    def __init__(self, plane: str, specs: Sequence[ControllerSpec | UnitSpec]) -> None:
        self._plane = plane
        self._threads: list[threading.Thread] = []
        self.ready: list[Ready] = []
        """What each server says of itself."""
        ended, self._alive = os.pipe()
        _lifelines[plane] = ended
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            for spec in specs:
                context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
                role = build(spec, context)
                self.ready.append(ready(role, listen(role, spec.listen)))
                thread = threading.Thread(target=self._serve, args=(role, context, ended), daemon=True)
                thread.start()
                self._threads.append(thread)
            undo.pop_all()

    def close(self) -> None:
        """End all servers; safe to call twice."""
        stop = _lifelines.pop(self._plane, None)
        if stop is not None:
            os.close(self._alive)
            for thread in self._threads:
                thread.join(_JOIN_S)
            os.close(stop)

    @staticmethod
    def _serve(role: Role, context: zmq.Context[zmq.Socket[bytes]], ended: int) -> None:
        role.reactor.watch(ended, role.reactor.stop)
        role.reactor.run()
        role.close()
        os.close(role.shared_memory[0])
        context.term()
