"""How long a successor waits for the clients of the controller before."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from controller_fakes import FakeReactor

from rl_transferqueue.controller.durable.absent_sessions import AbsentSessions
from rl_transferqueue.controller.durable.consumed_rows import Consumed, ConsumedRows
from rl_transferqueue.wire.process_liveness import identify, this_process

ONE, TWO = b"session1", b"session2"


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_a_session_ends_once_with_its_process_or_after_its_time(child: subprocess.Popen[bytes]) -> None:
    reactor, ended = FakeReactor(), list[bytes]()
    absent = AbsentSessions(reactor, 5.0, ended.append)  # type: ignore[arg-type]
    absent.wait_for(ONE, identify(child.pid))
    absent.wait_for(TWO, this_process())
    assert (len(absent), ended, [seconds for seconds, _, _ in reactor.timers]) == (2, [], [5.0, 5.0])
    first, _ = list(reactor.watched)
    reactor.watched[first]()
    assert (ended, len(absent), reactor.timers[0][2].cancelled) == ([ONE], 1, True)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(first)
    reactor.timers[1][1]()
    assert (ended, len(absent), reactor.watched) == ([ONE, TWO], 0, {})


def test_one_of_another_host_ends_after_its_time_alone() -> None:
    reactor, ended = FakeReactor(), list[bytes]()
    absent = AbsentSessions(reactor, 5.0, ended.append)  # type: ignore[arg-type]
    for session in (ONE, TWO):
        absent.wait_for(session, None)
    assert (len(absent), ended, reactor.watched) == (2, [], {})
    absent.came_back(TWO)
    reactor.timers[0][1]()
    assert (len(absent), ended, reactor.timers[1][2].cancelled) == (0, [ONE], True)


def test_one_whose_process_has_ended_is_not_waited_for(child: subprocess.Popen[bytes]) -> None:
    reactor, ended = FakeReactor(), list[bytes]()
    process = identify(child.pid)
    child.kill()
    child.wait(60)
    absent = AbsentSessions(reactor, 5.0, ended.append)  # type: ignore[arg-type]
    absent.wait_for(ONE, process)
    assert (ended, len(absent)) == ([ONE], 0)


def test_one_that_came_back_does_not_end() -> None:
    reactor, ended = FakeReactor(), list[bytes]()
    absent = AbsentSessions(reactor, 5.0, ended.append)  # type: ignore[arg-type]
    absent.wait_for(ONE, this_process())
    absent.came_back(ONE)
    absent.came_back(TWO)
    assert (reactor.watched, reactor.timers[0][2].cancelled, ended) == ({}, True, [])
    absent.wait_for(TWO, this_process())
    absent.close()
    assert reactor.watched == {}


def test_only_sessions_with_rows_on_their_way_are_awaited(tmp_path: Path) -> None:
    """As a successor finds them that opens the file of a killed controller."""
    rows = ConsumedRows(tmp_path / "consumed")
    for session in (ONE, TWO):
        rows.open_session(session, this_process())
    rows.take(Consumed("p", "t", np.array([1, 2])), ONE, 7)
    rows.take(Consumed("p", "t", np.array([3])), ONE, 8)
    rows.take(Consumed("p", "t", np.array([4])), TWO, 1)
    rows.confirm(ONE, [7])
    rows.confirm(TWO, [1])
    rows.close()
    rows = ConsumedRows(tmp_path / "consumed")
    assert rows.awaited() == {ONE: this_process()}
    assert (rows.unconfirmed(ONE), rows.unconfirmed(TWO)) == ([8], [])
    assert [its.generations.tolist() for its in rows.of(ONE, 8)] == [[3]]
    rows.open_session(TWO, None)
    rows.take(Consumed("p", "t", np.array([5])), TWO, 2)
    assert rows.awaited() == {ONE: this_process(), TWO: None}
    rows.confirm(TWO, [2])
    rows.end_session(ONE, gone=False)
    assert (rows.awaited(), rows.has_ended(ONE), rows.has_ended(TWO)) == ({}, True, False)
    rows.end_session(TWO, gone=True)
    assert not rows.has_ended(TWO)
    rows.close()
