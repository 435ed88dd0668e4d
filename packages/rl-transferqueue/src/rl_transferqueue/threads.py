"""The backend `memory`: the servers of a plane as threads of this process. For tests and programs of one process: nothing to start or to kill."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Sequence

from rl_protocol.errors import PlaneLostError
from rl_transferqueue.specs import ControllerSpec, Ready, UnitSpec

_JOIN_S = 5.0
_START_S = 5.0
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

    def __init__(self, plane: str, controller: ControllerSpec, units: Sequence[UnitSpec]) -> None:
        self._plane = plane
        self._threads: list[threading.Thread] = []
        ended, self._alive = os.pipe()
        _lifelines[plane] = ended
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            told = [self._start(spec, ended) for spec in (controller, *units)]
            self.ready = [said.get(timeout=_START_S) for said in told]
            """What each server says of itself."""
            undo.pop_all()

    def close(self) -> None:
        """End all servers; safe to call twice."""
        ended = _lifelines.pop(self._plane, None)
        if ended is not None:
            os.close(self._alive)
            for thread in self._threads:
                thread.join(_JOIN_S)
            os.close(ended)

    def _start(self, spec: ControllerSpec | UnitSpec, ended: int) -> queue.SimpleQueue[Ready]:
        from rl_transferqueue.serve import build, listen, ready  # what clients need not load

        role = build(spec)
        endpoints = listen(role, spec.listen, spec.port)
        said: queue.SimpleQueue[Ready] = queue.SimpleQueue()

        def serve() -> None:
            role.reactor.watch(ended, role.reactor.stop)
            role.when_ready(lambda: said.put(ready(role, endpoints)))
            role.reactor.run()
            role.close()
            os.close(role.shared_memory[0])

        thread = threading.Thread(target=serve, name=f"rl-transferqueue-{spec.address}", daemon=True)
        thread.start()
        self._threads.append(thread)
        return said
