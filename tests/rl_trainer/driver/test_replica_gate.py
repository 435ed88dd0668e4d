"""Permits in the order of turns, and weight updates apart from generation."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from rl_trainer.driver.replica_gate import Permits, ReplicaGate


@given(
    count=st.integers(1, 4),
    takers=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 5), st.integers(0, 8)), max_size=12),
)
def test_no_permit_is_lost_by_a_taker_that_is_cancelled(count, takers):
    """A taker has a turn, holds its permit for some turns of the event loop, and may be cancelled
    at another."""

    async def main():
        permits, held, most = Permits(count, 60), 0, 0

        async def take(turn, turns):
            nonlocal held, most
            await permits.acquire(turn)
            held += 1
            most = max(most, held)
            try:
                for _ in range(turns):
                    await asyncio.sleep(0)
            finally:
                held -= 1
                permits.release()

        tasks = [asyncio.create_task(take(turn, turns)) for turn, turns, _ in takers]
        for now in range(5):
            await asyncio.sleep(0)
            for task, (*_, cancelled) in zip(tasks, takers, strict=True):
                if cancelled == now:
                    task.cancel()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        assert most <= count
        for _ in range(count):
            await asyncio.wait_for(permits.acquire(0), 10)

    asyncio.run(main())


def test_the_lowest_turn_gets_the_next_permit():
    async def main():
        permits, order = Permits(1, 60), []
        await permits.acquire(9)

        async def take(turn):
            await permits.acquire(turn)
            order.append(turn)
            permits.release()

        async with asyncio.TaskGroup() as tasks:
            for turn in (5, 2, 7, 2):
                tasks.create_task(take(turn))
            await asyncio.sleep(0)
            permits.release()
        assert order == [2, 2, 5, 7]

    asyncio.run(main())


def test_an_update_waits_for_what_runs_and_nothing_starts_before_it_ends():
    async def main():
        gate, events = ReplicaGate(60), []
        await gate.enter()

        async def update():
            async with gate.closed():
                events.append("update begins")
                await asyncio.sleep(0)
                events.append("update ends")

        async def generate():
            await gate.enter()
            events.append("generates")
            gate.leave()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(update())
            await asyncio.sleep(0)
            tasks.create_task(generate())
            for _ in range(5):
                await asyncio.sleep(0)
            assert events == []
            gate.leave()
        assert events == ["update begins", "update ends", "generates"]

    asyncio.run(main())


def test_an_update_that_does_not_drain_lets_calls_run_and_none_begin():
    async def main():
        gate = ReplicaGate(60)
        await gate.enter()
        async with gate.closed(drain=False):
            entering = asyncio.create_task(gate.enter())
            for _ in range(5):
                await asyncio.sleep(0)
            assert not entering.done()
            gate.leave()
        await asyncio.wait_for(entering, 10)

    asyncio.run(main())


def test_an_update_that_fails_opens_the_gate():
    async def main():
        gate = ReplicaGate(60)
        try:
            async with gate.closed():
                raise ConnectionError
        except ConnectionError:
            await asyncio.wait_for(gate.enter(), 10)

    asyncio.run(main())
