"""`Writer` against a fake controller: messages, retries, and the return of memory."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from client_fakes import BATCH, FakeController, FakeMemory

from rl_protocol import BatchError, ColumnSpec, PlaneLostError, PlaneTimeout
from rl_transferqueue.client.deadline import deadline_after
from rl_transferqueue.client.reservation import Reservation
from rl_transferqueue.client.writer import Writer
from rl_transferqueue.wire.messages import Commit
from rl_transferqueue.wire.spans import Span

KEYS = ("a", "b", "c", "d")
COMMIT = Commit("p", KEYS)
SPEC = ColumnSpec(name="x", kind="dense", dtype="float64")


def writer(controller: FakeController, memory: FakeMemory, most: int = 1 << 20) -> Writer:
    return Writer(cast("Any", controller), cast("Any", memory), Reservation(most), units=2, session=b"session1")


def lose_unit_0(span: Span) -> None:
    if span.unit == 0:
        raise PlaneLostError("storage unit 0 has ended")


def test_a_put_reserves_then_commits_and_the_next_put_only_commits() -> None:
    async def main() -> None:
        controller, memory = FakeController(), FakeMemory()
        writing = writer(controller, memory)
        controller.spare = Span(1, 0, 4096)
        assert await writing.put(COMMIT, BATCH, deadline_after(60)) == (0, 1, 2, 3)
        assert controller.kinds() == ["Reserve", "Commit"]
        await writing.put(COMMIT, BATCH, deadline_after(60))
        assert controller.kinds() == ["Reserve", "Commit", "Commit"]
        assert memory.written[1] == Span(1, 0, 64)
        assert writing.bytes_written == 2 * BATCH.nbytes
        writing.give_back_reserve()
        assert controller.abandoned == [Span(1, 64, 4032)]

    asyncio.run(main())


def test_a_put_that_can_not_be_sent_does_not_end_reserving_ahead() -> None:
    async def main() -> None:
        controller, memory = FakeController(), FakeMemory()
        writing = writer(controller, memory)
        controller.unsendable = BatchError("a tag of more than 64 bits")
        with pytest.raises(BatchError, match="64 bits"):
            await writing.put(COMMIT, BATCH, deadline_after(60))
        controller.spare = Span(1, 0, 4096)
        await writing.put(COMMIT, BATCH, deadline_after(60))
        await writing.put(COMMIT, BATCH, deadline_after(60))
        assert controller.kinds() == ["Reserve", "Commit", "Reserve", "Commit", "Commit"]
        assert memory.written[-1] == Span(1, 0, 64)

    asyncio.run(main())


def test_tags_alone_need_no_memory() -> None:
    async def main() -> None:
        controller = FakeController()
        await writer(controller, FakeMemory()).put(COMMIT, None, deadline_after(60))
        assert controller.kinds() == ["Commit"]

    asyncio.run(main())


def test_a_put_to_a_unit_that_ends_goes_to_another_unit() -> None:
    async def main() -> None:
        controller, memory = FakeController(), FakeMemory()

        def end(span: Span) -> None:
            controller.unit = 1
            lose_unit_0(span)

        memory.on_write = end
        await writer(controller, memory).put(COMMIT, BATCH, deadline_after(60))
        assert controller.kinds() == ["Reserve", "Reserve", "Commit"]
        assert [span.unit for span in memory.written] == [1]
        assert [span.unit for span in controller.abandoned] == [0]

    asyncio.run(main())


def test_a_unit_that_failed_is_not_written_to_again() -> None:
    async def main() -> None:
        controller, memory = FakeController(), FakeMemory()
        memory.on_write = lose_unit_0
        with pytest.raises(PlaneTimeout, match=r"unit 0.*no other unit had room"):
            await writer(controller, memory).put(COMMIT, BATCH, deadline_after(0.02))
        assert memory.written == []
        assert "Commit" not in controller.kinds()

    asyncio.run(main())


def test_a_lost_plane_is_not_retried() -> None:
    async def main() -> None:
        controller, memory = FakeController(), FakeMemory()

        def end(span: Span) -> None:
            controller.lost = "the controller has ended"
            lose_unit_0(span)

        memory.on_write = end
        with pytest.raises(PlaneLostError, match="controller has ended"):
            await writer(controller, memory).put(COMMIT, BATCH, deadline_after(60))

    asyncio.run(main())


def test_a_put_that_fails_gives_its_memory_back() -> None:
    async def main() -> None:
        controller, memory = FakeController(), FakeMemory()

        def fail(span: Span) -> None:
            raise RuntimeError("no")

        memory.on_write = fail
        with pytest.raises(RuntimeError, match="no"):
            await writer(controller, memory).put(COMMIT, BATCH, deadline_after(60))
        assert controller.abandoned == [Span(0, 4096, 4096)]

    asyncio.run(main())


def test_a_draft_is_committed_where_it_lies_and_belongs_to_one_plane() -> None:
    async def main() -> None:
        controller, memory = FakeController(), FakeMemory()
        writing = writer(controller, memory)
        draft = await writing.alloc([SPEC], 4, {}, deadline_after(60))
        await writing.put(COMMIT, draft, deadline_after(60))
        assert controller.kinds() == ["Reserve", "Commit"]
        assert memory.written == [Span(0, 4096, 4096)]
        with pytest.raises(BatchError):
            await writing.put(COMMIT, draft, deadline_after(60))

    asyncio.run(main())


def test_a_draft_of_another_client_is_refused_even_if_this_one_reserved_the_same_span() -> None:
    async def main() -> None:
        ours, theirs = (writer(FakeController(), FakeMemory()) for _ in range(2))
        draft = await theirs.alloc([SPEC], 4, {}, deadline_after(60))
        await ours.alloc([SPEC], 4, {}, deadline_after(60))
        with pytest.raises(BatchError, match="the client whose alloc made it"):
            await ours.put(COMMIT, draft, deadline_after(60))
        await theirs.put(COMMIT, draft, deadline_after(60))

    asyncio.run(main())


def test_the_memory_of_a_draft_is_given_back_with_its_last_array() -> None:
    async def main() -> None:
        controller = FakeController()
        writing = writer(controller, FakeMemory())
        draft = await writing.alloc([SPEC], 4, {}, deadline_after(60))
        array = draft["x"]
        del draft
        await asyncio.sleep(0)
        assert controller.abandoned == []
        del array
        await asyncio.sleep(0)
        assert controller.abandoned == [Span(0, 4096, 4096)]

    asyncio.run(main())


@pytest.mark.parametrize("end", ["put", "discard"])
def test_a_draft_that_has_ended_gives_nothing_back_when_it_is_freed(end: str) -> None:
    async def main() -> None:
        controller = FakeController()
        writing = writer(controller, FakeMemory())
        draft = await writing.alloc([SPEC], 4, {}, deadline_after(60))
        if end == "put":
            await writing.put(COMMIT, draft, deadline_after(60))
        else:
            draft.discard()
        given_back = list(controller.abandoned)
        assert len(given_back) == (end == "discard")
        del draft
        await asyncio.sleep(0)
        assert controller.abandoned == given_back

    asyncio.run(main())


def test_close_waits_for_writes_and_gives_nothing_back() -> None:
    async def main() -> None:
        controller, memory = FakeController(), FakeMemory()
        writing = writer(controller, memory)
        controller.spare = Span(1, 0, 4096)
        await writing.put(COMMIT, BATCH, deadline_after(60))
        await writing.close()
        writing.give_back_reserve()
        assert controller.abandoned == []

    asyncio.run(main())
