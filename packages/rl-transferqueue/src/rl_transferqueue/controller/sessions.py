"""Sessions of clients: their lifelines, the requests they wait for, and what they took."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rl_protocol.errors import WireError
from rl_transferqueue.controller.put_answers import PutAnswers
from rl_transferqueue.controller.unacknowledged import Unacknowledged
from rl_transferqueue.transport.control_server import Caller
from rl_transferqueue.transport.event_loop import Reactor, Timer
from rl_transferqueue.wire.process_liveness import ProcessId

SESSION_BYTES = 8
"""Length of a session's identity."""


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """A request that is answered later; `leave` removes it from where it waits."""

    timer: Timer
    leave: Callable[[], None]


@dataclass(slots=True)
class Session:
    """One client, from its `Hello` to its `Bye` or its death."""

    pidfd: int
    """Of the client's process, or the socket of a client on another host: readable when the client
    is gone."""
    remote: bool
    name: str
    """For error messages."""
    host: str = ""
    """`this_host` of the client."""
    process: ProcessId | None = None
    """None: it maps no memory of the plane."""
    abandoned: int = 0
    """Spans it has given back while bytes for them may still have been on their way."""
    waiting: dict[int, WaitingRequest] = field(default_factory=dict[int, WaitingRequest])
    unacknowledged: Unacknowledged = field(default_factory=Unacknowledged)
    puts: PutAnswers = field(default_factory=PutAnswers)


class Sessions:
    """All sessions: live ones, and departed ones, whose processes may still read what they have
    leased.

    Lifecycle of a session: `open`, then live until `depart`, then departed until `forget`.

    Args:
        on_died: called with a session, live or departed, whose process has ended.
    """

    def __init__(self, reactor: Reactor, on_died: Callable[[bytes], None]) -> None:
        self._reactor = reactor
        self._on_died = on_died
        self._live: dict[bytes, Session] = {}
        self._departed: dict[bytes, Session] = {}
        self._watched: set[bytes] = set()
        """Sessions whose client is not known to be gone."""

    def __len__(self) -> int:
        return len(self._live)

    def check_new(self, session: bytes) -> None:
        """Raise WireError unless a session with this identity can be opened."""
        if session in self._live or session in self._departed or len(session) != SESSION_BYTES:
            raise WireError(f"This session exists already, or its identity is not {SESSION_BYTES} bytes.")

    def open(
        self,
        session: bytes,
        pidfd: int,
        *,
        remote: bool,
        name: str,
        host: str = "",
        process: ProcessId | None = None,
    ) -> None:
        """Add a live session; `pidfd` is closed when the session is forgotten."""
        self._live[session] = Session(pidfd, remote, name, host, process)

        def ended() -> None:
            self._reactor.unwatch(pidfd)
            self._watched.discard(session)
            self._on_died(session)

        self._watched.add(session)
        self._reactor.watch(pidfd, ended)

    def get(self, session: bytes) -> Session:
        """A live session.

        Raises:
            WireError: it was never opened, or has departed.
        """
        found = self._live.get(session)
        if found is None:
            raise WireError("This session is not known or has ended; connect again.")
        return found

    def find(self, session: bytes) -> Session | None:
        """A live session, or None."""
        return self._live.get(session)

    def departed(self, session: bytes) -> Session | None:
        """A departed session that is not forgotten, or None."""
        return self._departed.get(session)

    def live(self) -> Iterable[Session]:
        """All live sessions."""
        return self._live.values()

    def names(self) -> dict[bytes, str]:
        """session -> name, of live and departed sessions."""
        return {session: its.name for session, its in (*self._departed.items(), *self._live.items())}

    @property
    def waiting(self) -> int:
        """Requests that wait now."""
        return sum(len(session.waiting) for session in self._live.values())

    def park(self, caller: Caller, seconds: float, leave: Callable[[], None], expired: Callable[[], None]) -> None:
        """Let a request wait. When its time is up, `leave` is called, and then `expired`, which
        answers it."""

        def expire() -> None:
            self.unpark(caller)
            leave()
            expired()

        waiting = WaitingRequest(self._reactor.call_later(seconds, expire), leave)
        self.get(caller.session).waiting[caller.request] = waiting

    def unpark(self, caller: Caller) -> WaitingRequest | None:
        """The request does not wait any more; None: it did not wait."""
        session = self._live.get(caller.session)
        waiting = session.waiting.pop(caller.request, None) if session is not None else None
        if waiting is not None:
            waiting.timer.cancel()
        return waiting

    def depart(self, session: bytes) -> Session:
        """A live session ends: its requests stop waiting."""
        ended = self._departed[session] = self._live.pop(session)
        for waiting in ended.waiting.values():
            waiting.timer.cancel()
            waiting.leave()
        return ended

    def forget(self, session: bytes) -> None:
        """A departed session holds nothing any more, so its process is not watched; others are left
        alone."""
        if session in self._departed:
            pidfd = self._departed.pop(session).pidfd
            if session in self._watched:
                self._watched.discard(session)
                self._reactor.unwatch(pidfd)
            os.close(pidfd)

    def close(self) -> None:
        """Close the descriptors of all sessions."""
        for session in (*self._live.values(), *self._departed.values()):
            os.close(session.pidfd)
