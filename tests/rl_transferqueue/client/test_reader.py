"""`Reader` against a fake controller: messages, the location cache, and retries."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from client_fakes import BATCH, FakeController, FakeMemory

from rl_protocol import PlaneLostError
from rl_transferqueue.client.copied_columns import CopiedColumns
from rl_transferqueue.client.deadline import deadline_after
from rl_transferqueue.client.location_cache import LocationCache
from rl_transferqueue.client.reader import Reader
from rl_transferqueue.memory.anchors import Anchor

QUERY = ("p", ("a", "b", "c", "d"), ("x",), ())


class FakeLeases:
    def __init__(self) -> None:
        self.flushed = 0

    def new(self) -> tuple[int, Anchor]:
        return 1, Anchor()

    def flush(self) -> None:
        self.flushed += 1


class FakeEpochs:
    valid = True

    def unchanged(self, slots: object, epochs: object) -> bool:
        return self.valid


def reader(
    controller: FakeController, memory: FakeMemory, epochs: FakeEpochs | None = None
) -> tuple[Reader, FakeLeases]:
    leases = FakeLeases()
    copies = CopiedColumns(1 << 20, views=lambda _: True)
    reading = Reader(cast("Any", controller), cast("Any", memory), cast("Any", leases), copies)
    if epochs is not None:
        reading.use_cache(LocationCache(cast("Any", epochs)))
    return reading, leases


def test_a_repeated_get_sends_a_message_only_once_its_location_is_stale() -> None:
    async def main() -> None:
        controller, epochs = FakeController(), FakeEpochs()
        reading, _ = reader(controller, FakeMemory(), epochs)
        for _ in range(3):
            assert await reading.get(QUERY, deadline_after(60)) is BATCH
        assert controller.kinds() == ["Locate"]
        epochs.valid = False
        await reading.get(QUERY, deadline_after(60))
        assert controller.kinds() == ["Locate", "Locate"]
        assert reading.bytes_read == 4 * BATCH.nbytes

    asyncio.run(main())


def test_without_a_cache_every_get_asks() -> None:
    async def main() -> None:
        controller = FakeController()
        reading, _ = reader(controller, FakeMemory())
        for _ in range(2):
            await reading.get(QUERY, deadline_after(60))
        assert controller.kinds() == ["Locate", "Locate"]

    asyncio.run(main())


def test_no_columns_are_located_and_not_read() -> None:
    async def main() -> None:
        controller, memory = FakeController(), FakeMemory()
        reading, _ = reader(controller, memory, FakeEpochs())
        empty = await reading.get(("p", ("a", "b"), (), ()), deadline_after(60))
        assert (len(empty), empty.field_names) == (2, ())
        assert (controller.kinds(), reading.bytes_read) == (["Locate"], 0)

    asyncio.run(main())


def test_forgotten_locations_are_asked_for_again_and_leases_are_flushed() -> None:
    async def main() -> None:
        controller = FakeController()
        reading, leases = reader(controller, FakeMemory(), FakeEpochs())
        await reading.get(QUERY, deadline_after(60))
        reading.forget("other")
        await reading.get(QUERY, deadline_after(60))
        assert controller.kinds() == ["Locate"]
        for forget in (lambda: reading.forget("p"), reading.forget):
            forget()
            await reading.get(QUERY, deadline_after(60))
        assert controller.kinds() == ["Locate"] * 3
        reading.forget_blocks([7])
        assert leases.flushed == 4

    asyncio.run(main())


def test_rows_of_a_unit_that_ends_are_located_again() -> None:
    async def main() -> None:
        controller, memory = FakeController(), FakeMemory()
        failures = [PlaneLostError("storage unit 0 has ended")]

        def fail_once() -> None:
            if failures:
                raise failures.pop()

        memory.on_read = fail_once
        reading, _ = reader(controller, memory, FakeEpochs())
        assert await reading.get(QUERY, deadline_after(60)) is BATCH
        assert controller.kinds() == ["Locate", "Locate"]

    asyncio.run(main())


def test_a_read_that_keeps_failing_ends_at_the_deadline_or_with_the_plane() -> None:
    async def main() -> None:
        controller, memory = FakeController(), FakeMemory()

        def fail() -> None:
            raise PlaneLostError("storage unit 0 has ended")

        memory.on_read = fail
        reading, _ = reader(controller, memory)
        with pytest.raises(PlaneLostError, match="unit 0"):
            await reading.get(QUERY, deadline_after(0.02))

        def end_plane() -> None:
            controller.lost = "the controller has ended"
            fail()

        memory.on_read = end_plane
        with pytest.raises(PlaneLostError, match="controller has ended"):
            await reading.get(QUERY, deadline_after(60))

    asyncio.run(main())
