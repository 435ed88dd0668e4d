"""`MemoryRequests`, without sockets: when requests are answered and when memory is freed."""

from __future__ import annotations

import os

import pytest
from controller_fakes import FakeReactor, FakeReplies, FakeUnits

from rl_protocol.errors import CapacityTimeout, PlaneLostError
from rl_transferqueue.controller.memory_accounting.capacity import Capacity
from rl_transferqueue.controller.memory_requests import MemoryRequests
from rl_transferqueue.controller.rows.block_table import BlockTable
from rl_transferqueue.controller.sessions import Sessions
from rl_transferqueue.memory.block_epochs import Epochs
from rl_transferqueue.transport.control_server import Caller
from rl_transferqueue.wire.messages import Abandon, Fence, Reclaim, Reserve, Reserved

ONE, TWO = b"session1", b"session2"
ALL = 1024


class Plane:
    def __init__(self, nbytes: int = ALL, *, fence_all: bool = False, remote: bool = False) -> None:
        self.reactor, self.units, self.replies = FakeReactor(), FakeUnits(), FakeReplies()
        self.sessions = Sessions(self.reactor, lambda _: None)
        for session in (ONE, TWO):
            self.sessions.open(session, os.open(os.devnull, os.O_RDONLY), remote=remote, name=session.decode())
        self.capacity = Capacity(1, nbytes)
        self.memory = MemoryRequests(
            self.capacity, self.units, self.sessions, BlockTable(Epochs(8)), self.replies, fence_all=fence_all
        )

    def ask(self, caller: Caller, nbytes: int, timeout_s: float = 5.0) -> None:
        self.memory.handlers[Reserve](caller, Reserve(nbytes, timeout_s))

    def reserved(self, caller: Caller, nbytes: int):
        self.ask(caller, nbytes)
        ((who, answer),) = self.replies.take()
        assert who == caller
        assert isinstance(answer, Reserved)
        return answer.span

    def abandon(self, caller: Caller, span, *, late: bool) -> None:
        self.memory.handlers[Abandon](caller, Abandon((span,), late))


def test_a_put_waits_until_memory_is_given_back_and_holders_are_asked_for_theirs() -> None:
    plane = Plane()
    span = plane.reserved(Caller(ONE, 1), ALL)
    plane.ask(Caller(TWO, 1), 64)
    assert plane.replies.take() == [(Caller(ONE, 0), Reclaim())]
    plane.abandon(Caller(ONE, 2), span, late=False)
    ((who, answer),) = plane.replies.take()
    assert who == Caller(TWO, 1)
    assert isinstance(answer, Reserved)
    assert plane.sessions.waiting == 0


def test_a_put_that_may_not_wait_or_waited_too_long_says_who_holds_the_memory() -> None:
    plane = Plane()
    plane.reserved(Caller(ONE, 1), ALL)
    with pytest.raises(CapacityTimeout, match="Reserved for puts: session1 1024 bytes"):
        plane.ask(Caller(TWO, 1), 64, timeout_s=0)
    plane.ask(Caller(TWO, 2), 64)
    plane.replies.take()
    _, expire, _ = plane.reactor.timers[-1]
    expire()
    ((who, error),) = plane.replies.take()
    assert who == Caller(TWO, 2)
    assert isinstance(error, CapacityTimeout)


def test_memory_that_bytes_may_still_reach_is_free_after_the_units_answer() -> None:
    plane = Plane()
    span = plane.reserved(Caller(ONE, 1), ALL)
    plane.abandon(Caller(ONE, 2), span, late=True)
    assert plane.capacity.used == ALL
    assert plane.units.reply() == Fence(ONE, (span,), False, 1)
    assert plane.capacity.used == 0


@pytest.mark.parametrize(("fence_all", "remote"), [(False, False), (True, False), (False, True)])
def test_the_memory_of_a_session_that_ends_is_fenced_where_its_bytes_may_be_under_way(
    fence_all: bool, remote: bool
) -> None:
    plane = Plane(fence_all=fence_all, remote=remote)
    span = plane.reserved(Caller(ONE, 1), ALL)
    plane.sessions.depart(ONE)
    plane.memory.end_session(ONE, remote=remote)
    if fence_all or remote:
        assert plane.capacity.used == ALL
        assert plane.units.reply() == Fence(ONE, (span,), True, 0)
    assert plane.capacity.used == 0


def test_puts_fail_when_the_last_unit_has_ended() -> None:
    plane = Plane()
    plane.reserved(Caller(ONE, 1), ALL)
    plane.ask(Caller(TWO, 1), 64)
    plane.replies.take()
    plane.units.units.clear()
    plane.memory.lose_unit(0)
    ((who, error),) = plane.replies.take()
    assert who == Caller(TWO, 1)
    assert isinstance(error, PlaneLostError)


def test_nothing_is_reserved_ahead_while_a_put_waits() -> None:
    plane = Plane(1 << 20)
    assert plane.memory.spare(Caller(ONE, 1), 0) is None
    assert plane.memory.spare(Caller(ONE, 1), 64) is not None
    plane.ask(Caller(TWO, 1), 1 << 20)
    assert plane.memory.spare(Caller(ONE, 2), 64) is None
