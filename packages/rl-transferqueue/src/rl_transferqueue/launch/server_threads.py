"""The backend `memory`: the servers of a plane as threads of this process.

For tests and programs of a single process: there is no process to start or to kill.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Sequence

from rl_protocol.errors import PlaneLostError, RLError
from rl_transferqueue.controller.controller_spec import ControllerSpec
from rl_transferqueue.launch.server_specs import Ready, UnitSpec
from rl_transferqueue.wire.process_liveness import add_lifeline, pop_lifeline

_JOIN_S = 5.0
_START_S = 30.0


class ServerThreads:
    """The servers of one plane. Lifecycle: running from the start until `close`."""

    def __init__(self, plane: str, controller: ControllerSpec, units: Sequence[UnitSpec]) -> None:
        self._plane = plane
        self._controller, self._units = _Threads(), _Threads()
        add_lifeline(plane, self._controller.ended)
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            told = [self._controller.start(controller), *(self._units.start(unit) for unit in units)]
            self.ready = [_said(said) for said in told]
            """What each server reports."""
            undo.pop_all()

    def close(self) -> None:
        """End all servers, the controller first, which would report units that end as lost; safe
        to call twice."""
        if pop_lifeline(self._plane) is not None:
            self._controller.end()
            self._units.end()


class _Threads:
    """Servers that end together."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self.ended, self._end = os.pipe()
        """`ended` becomes readable when they are to end: by a byte, as a forked process keeps the
        pipe open."""

    def end(self) -> None:
        os.write(self._end, b"\0")
        for thread in self._threads:
            thread.join(_JOIN_S)
        os.close(self._end)
        os.close(self.ended)

    def start(self, spec: ControllerSpec | UnitSpec) -> queue.SimpleQueue[Ready | RLError]:
        from rl_transferqueue.launch.server_process import build, listen, ready

        role = build(spec)
        endpoints = listen(role, spec)
        said: queue.SimpleQueue[Ready | RLError] = queue.SimpleQueue()

        def serve() -> None:
            role.reactor.watch(self.ended, role.reactor.stop)
            role.when_ready(lambda: said.put(ready(role, endpoints)))
            try:
                role.reactor.run()
            except RLError as error:
                said.put(error)
            role.close()
            os.close(role.shared_memory[0])

        thread = threading.Thread(target=serve, name=f"rl-transferqueue-{spec.address}", daemon=True)
        thread.start()
        self._threads.append(thread)
        return said


def _said(answer: queue.SimpleQueue[Ready | RLError]) -> Ready:
    try:
        said = answer.get(timeout=_START_S)
    except queue.Empty:
        raise PlaneLostError(f"A server of the data plane, a thread, was not up within {_START_S:g} s.") from None
    if isinstance(said, RLError):
        raise said
    return said
