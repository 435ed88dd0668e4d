from __future__ import annotations

import asyncio

import pytest

from rl_protocol import HangError, PlaneTimeout
from rl_trainer.asyncio_tasks import deadline
from rl_trainer.driver.batch_queue import BatchQueue
from rl_trainer.driver.replica_gate import Permits, ReplicaGate

SHORT_S = 0.01


def test_an_error_within_that_is_a_timeout_too_stays_what_it_is():
    async def main():
        async with deadline(60, "nothing"):
            raise PlaneTimeout("the plane was late")

    with pytest.raises(PlaneTimeout, match="the plane was late"):
        asyncio.run(main())


async def begin():
    await BatchQueue[str](1, 2, SHORT_S).begin()


async def get():
    queue = BatchQueue[str](1, 2, SHORT_S)
    await queue.admit(1)
    await queue.get(1, lambda _: None)


async def sampled():
    queue = BatchQueue[str](1, 2, SHORT_S)
    await queue.admit(1)
    await queue.sampled()


async def rewind():
    queue = BatchQueue[str](1, 2, SHORT_S)
    await queue.admit(1)
    await queue.begin()
    async with queue.rewound():
        pass


async def acquire():
    permits = Permits(1, SHORT_S)
    await permits.acquire(0)
    await permits.acquire(0)


async def enter():
    gate = ReplicaGate(SHORT_S)
    async with gate.closed():
        await gate.enter()


async def close():
    gate = ReplicaGate(SHORT_S)
    await gate.enter()
    async with gate.closed():
        pass


@pytest.mark.parametrize(
    ("wait", "what"),
    [
        (begin, "the training to admit a step"),
        (get, "the batch of step 1"),
        (sampled, "the end of sampling"),
        (rewind, "the end of sampling"),
        (acquire, "a permit to generate"),
        (enter, "the end of a weight update"),
        (close, "the running generation, before a weight update"),
    ],
)
def test_each_wait_of_the_pumps_ends_and_says_what_it_waited_for(wait, what):
    with pytest.raises(HangError, match=rf"The driver has waited for {what} for 0\.01 s"):
        asyncio.run(wait())


def test_a_permit_that_nobody_waits_for_any_more_is_not_lost():
    async def main():
        permits = Permits(1, SHORT_S)
        await permits.acquire(0)
        with pytest.raises(HangError):
            await permits.acquire(1)
        permits.release()
        await permits.acquire(2)

    asyncio.run(main())
