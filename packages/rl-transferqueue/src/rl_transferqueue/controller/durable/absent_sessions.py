"""Clients of the controller before that have rows on their way and have not come back."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import NamedTuple

from rl_protocol.errors import PlaneLostError, WireError
from rl_transferqueue.transport.event_loop import Reactor, Timer
from rl_transferqueue.wire.process_liveness import ProcessId, open_pidfd

log = logging.getLogger(__name__)


class _Absent(NamedTuple):
    pidfd: int | None
    """None: the process is on another host."""
    timer: Timer


class AbsentSessions:
    """Sessions that a successor of a controller waits for.

    A session ends with the process of its client, at once, or after `wait_s` seconds; one of a
    client on another host only after that time. Its client is refused from then on: others may have
    its rows.

    Args:
        reactor: calls back.
        wait_s: seconds.
        end: called once with each session that ends.
    """

    def __init__(self, reactor: Reactor, wait_s: float, end: Callable[[bytes], None]) -> None:
        self._reactor = reactor
        self._wait_s = wait_s
        self._end = end
        self._absent: dict[bytes, _Absent] = {}

    def __len__(self) -> int:
        return len(self._absent)

    def wait_for(self, session: bytes, process: ProcessId | None) -> None:
        """Wait for the client of a session; `process` is None for one on another host."""
        client = f"client pid {process.pid}" if process is not None else f"client {session.hex()} of another host"

        def ended() -> None:
            self.came_back(session)
            self._ended(session, client, "has ended, too")

        def late() -> None:
            self.came_back(session)
            self._ended(session, client, f"did not come back within {self._wait_s:g} s")

        try:
            pidfd = open_pidfd(process, "The client") if process is not None else None
        except PlaneLostError:
            ended()
            return
        if pidfd is not None:
            self._reactor.watch(pidfd, ended)
        self._absent[session] = _Absent(pidfd, self._reactor.call_later(self._wait_s, late))

    def came_back(self, session: bytes) -> None:
        """Do not wait for a session any more; others are ignored."""
        absent = self._absent.pop(session, None)
        if absent is not None:
            absent.timer.cancel()
            if absent.pidfd is not None:
                self._reactor.unwatch(absent.pidfd)
                os.close(absent.pidfd)

    def close(self) -> None:
        """Close all descriptors."""
        for session in list(self._absent):
            self.came_back(session)

    def _ended(self, session: bytes, client: str, why: str) -> None:
        log.info("%s of the controller before %s; rows on their way to it are free", client, why)
        self._end(session)


def refused() -> WireError:
    """The error of a client that comes back too late."""
    return WireError(
        "The controller of the data plane was replaced, and this client did not come back in time (start_local_plane(successor_s)) or lost "
        "its connection before: rows that were on their way to it are handed out again. Connect again."
    )
