"""`Sessions`: unique identities, departed sessions, and waiting requests."""

from __future__ import annotations

import os

import pytest
from controller_fakes import FakeReactor

from rl_protocol.errors import WireError
from rl_transferqueue.controller.sessions import Sessions
from rl_transferqueue.transport.control_server import Caller

ONE = b"session1"


def opened() -> tuple[Sessions, FakeReactor, list[bytes], int]:
    reactor, died = FakeReactor(), list[bytes]()
    sessions = Sessions(reactor, died.append)
    fd = os.open(os.devnull, os.O_RDONLY)
    sessions.open(ONE, fd, remote=False, name="pid 7")
    return sessions, reactor, died, fd


def test_an_identity_is_used_once_and_has_eight_bytes() -> None:
    sessions, _, _, _ = opened()
    sessions.check_new(b"session2")
    for wrong in (ONE, b"short"):
        with pytest.raises(WireError, match="exists already, or its identity is not 8 bytes"):
            sessions.check_new(wrong)
    sessions.depart(ONE)
    with pytest.raises(WireError):
        sessions.check_new(ONE)
    sessions.close()


def test_a_departed_session_is_watched_until_it_is_forgotten() -> None:
    sessions, reactor, died, fd = opened()
    sessions.depart(ONE)
    with pytest.raises(WireError, match="not known or has ended"):
        sessions.get(ONE)
    assert (sessions.find(ONE), len(sessions), sessions.names()) == (None, 0, {ONE: "pid 7"})
    reactor.watched[fd]()
    assert died == [ONE]
    sessions.forget(ONE)
    assert not reactor.watched
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    sessions.forget(ONE)


def test_a_live_session_is_not_forgotten() -> None:
    sessions, reactor, _, fd = opened()
    sessions.forget(ONE)
    assert fd in reactor.watched
    sessions.close()


def test_a_waiting_request_expires_leaves_or_is_answered_and_does_one_of_them() -> None:
    sessions, reactor, _, _ = opened()
    events: list[str] = []
    for request in (1, 2, 3):
        sessions.park(
            Caller(ONE, request),
            5.0,
            lambda request=request: events.append(f"{request} leaves"),
            lambda request=request: events.append(f"{request} expires"),
        )
    assert sessions.waiting == 3
    assert sessions.unpark(Caller(ONE, 1)) is not None
    assert sessions.unpark(Caller(ONE, 1)) is None
    assert reactor.timers[0][2].cancelled
    reactor.timers[1][1]()
    assert events == ["2 leaves", "2 expires"]
    sessions.depart(ONE)
    assert events[2:] == ["3 leaves"]
    assert reactor.timers[2][2].cancelled
    assert sessions.waiting == 0
    sessions.close()
