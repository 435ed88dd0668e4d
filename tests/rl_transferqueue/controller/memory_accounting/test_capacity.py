"""`Capacity` against a model that records the owner of every 64 bytes."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rl_protocol import BatchError, PlaneLostError, WireError
from rl_transferqueue.controller.memory_accounting.capacity import Capacity
from rl_transferqueue.wire.spans import ALIGN, Span, most_spare

CAPACITY = 64 * ALIGN
SESSIONS = st.sampled_from([b"one", b"two"])
SIZES = st.integers(1, 70 * ALIGN)


class SpaceMachine(RuleBasedStateMachine):
    """The owner of each (unit, cell) is None, a reservation of a session, "put", or "block"."""

    def __init__(self) -> None:
        super().__init__()
        self.capacity = Capacity(2, CAPACITY)
        self.owner: dict[tuple[int, int], object] = {(unit, i): None for unit in range(2) for i in range(64)}
        self.blocks: list[Span] = []
        self.spans: list[tuple[bytes, Span]] = []
        self.puts: dict[tuple[bytes, Span], bool] = {}
        """Under way -> whether the session has the range reserved again if the put fails."""
        self.reservations = 0

    def cells(self, span: Span) -> list[tuple[int, int]]:
        return [(span.unit, i) for i in range(span.offset // ALIGN, (span.offset + span.nbytes) // ALIGN)]

    @rule(session=SESSIONS, nbytes=SIZES)
    def reserve(self, session: bytes, nbytes: int) -> None:
        if nbytes > CAPACITY:
            with pytest.raises(BatchError, match=r"TransferQueueConfig\.capacity_mb"):
                self.capacity.reserve(session, nbytes)
            return
        span = self.capacity.reserve(session, nbytes)
        if span is None:
            for unit in {unit for unit, _ in self.owner}:
                free = "".join("x" if self.owner[unit, i] else "." for i in range(64))
                assert "." * -(-nbytes // ALIGN) not in free
            return
        assert nbytes <= span.nbytes < nbytes + ALIGN
        for cell in self.cells(span):
            assert self.owner[cell] is None
            self.owner[cell] = (session, self.reservations)
        self.reservations += 1
        self.spans.append((session, span))

    @rule(data=st.data(), end=st.sampled_from(["commit", "pin", "abandon", "other"]))
    def use_a_part(self, data: st.DataObject, end: str) -> None:
        if not self.spans:
            return
        session, span = data.draw(st.sampled_from(self.spans))
        first = data.draw(st.integers(0, span.nbytes // ALIGN - 1))
        size = data.draw(st.integers(1, span.nbytes // ALIGN - first))
        part = Span(span.unit, span.offset + first * ALIGN, size * ALIGN)
        asker = session if end != "other" else b"three"
        owners = {self.owner.get(cell) for cell in self.cells(part)}
        owner = owners.pop()
        mine = not owners and isinstance(owner, tuple) and owner[0] == asker
        if end == "abandon":
            self.capacity.abandon(asker, part)
            self.owner.update(dict.fromkeys(self.cells(part), None) if mine else {})
            self.puts.update({(asker, part): False} if (asker, part) in self.puts else {})
        elif mine and end == "pin":
            self.capacity.check(asker, part)
            self.capacity.pin(asker, part)
            self.puts[asker, part] = True
            self.owner.update(dict.fromkeys(self.cells(part), "put"))
        elif mine:
            self.capacity.check(asker, part)
            self.capacity.commit(asker, part)
            self.blocks.append(part)
            self.owner.update(dict.fromkeys(self.cells(part), "block"))
        else:
            with pytest.raises((WireError, PlaneLostError)):
                self.capacity.check(asker, part)

    @rule(number=st.integers(0, 50))
    def give(self, number: int) -> None:
        if self.blocks:
            block = self.blocks.pop(number % len(self.blocks))
            self.capacity.give(block)
            self.owner.update({cell: None for cell in self.cells(block) if cell in self.owner})

    @rule(data=st.data(), made=st.booleans(), left=st.booleans())
    def end_a_put(self, data: st.DataObject, made: bool, left: bool) -> None:
        if not self.puts:
            return
        session, span = data.draw(st.sampled_from(list(self.puts)))
        if left:
            self.capacity.abandon(session, span)
        self.capacity.unpin(session, span, made=made)
        reserved = self.puts.pop((session, span)) and not left
        if self.cells(span)[0] not in self.owner:
            return
        if made:
            self.blocks.append(span)
        elif reserved:
            self.spans.append((session, span))
            self.reservations += 1
        owner = "block" if made else (session, self.reservations) if reserved else None
        self.owner.update(dict.fromkeys(self.cells(span), owner))

    @rule(session=SESSIONS)
    def end_session(self, session: bytes) -> None:
        self.capacity.end_session(session)
        self.owner = {
            cell: None if isinstance(who, tuple) and who[0] == session else who for cell, who in self.owner.items()
        }
        self.spans = [(who, span) for who, span in self.spans if who != session]
        self.puts = {(who, span): reserved and who != session for (who, span), reserved in self.puts.items()}

    @rule(sure=st.integers(0, 9))
    def lose(self, sure: int) -> None:
        if sure == 0:
            self.capacity.lose(1)
            self.owner = {(unit, i): who for (unit, i), who in self.owner.items() if unit != 1}

    @invariant()
    def what_is_used_is_owned(self) -> None:
        assert self.capacity.used == ALIGN * sum(who is not None for who in self.owner.values())
        assert self.capacity.total == ALIGN * len(self.owner)
        assert set(self.capacity.holders()) == {who[0] for who in self.owner.values() if isinstance(who, tuple)}


TestSpace = SpaceMachine.TestCase
TestSpace.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_when_all_units_are_gone_nothing_can_be_reserved() -> None:
    capacity = Capacity(1, CAPACITY)
    capacity.lose(0)
    with pytest.raises(PlaneLostError, match="ended"):
        capacity.reserve(b"s", 1)


def test_memory_is_given_ahead_of_need_only_while_half_of_it_is_free() -> None:
    capacity = Capacity(1, 1 << 20)
    most = most_spare(1 << 20)
    assert most == (1 << 20) // 64
    assert capacity.spare(b"s", most + 1) is None
    given = 0
    while capacity.spare(b"s", most) is not None:
        given += most
    assert (1 << 19) < given <= (1 << 19) + most
    assert capacity.reserve(b"s", most) is not None


def test_memory_of_the_own_host_comes_first_and_that_of_others_when_it_is_full() -> None:
    capacity = Capacity(1, 1 << 12, "a")
    capacity.join(1, "b")
    capacity.join(2, "b")
    assert [capacity.reserve(b"s", 1 << 11, "a").unit for _ in range(2)] == [0, 0]
    assert sorted(capacity.reserve(b"s", 1 << 11, "b").unit for _ in range(4)) == [1, 1, 2, 2]
    assert capacity.reserve(b"s", 64, "b") is None
    capacity.end_session(b"s")
    assert {capacity.reserve(b"s", 1 << 12, "a").unit for _ in range(3)} == {0, 1, 2}
    capacity.end_session(b"s")
    capacity.lose(0)
    assert capacity.reserve(b"s", 64, "a").unit in (1, 2)
    assert {capacity.reserve(b"s", 64, "elsewhere").unit for _ in range(2)} == {1, 2}
