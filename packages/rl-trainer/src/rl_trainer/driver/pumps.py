"""What the two pumps of the training loop share: the steps to sample, and the sampled batches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from rl_protocol import DataLostError, KVBatchMeta, RLError, RolloutError

Batch = TypeVar("Batch")


class BatchQueue(Generic[Batch]):
    """Hands one batch per step, in order, from the rollouts to the training.

    A step is sampled once the training admits it, so sampling never runs further ahead than the
    training allows. No wait here has a deadline of its own: each ends with a worker's call, which
    has one, and if that call fails, the TaskGroup of the pumps cancels the wait.

    Args:
        first: the first step to sample.
        last: the last one.
    """

    def __init__(self, first: int, last: int) -> None:
        self._next = first
        self._last = last
        self._admitted = first - 1
        self._ready: dict[int, Batch | DataLostError] = {}
        self._sampling = False
        self._halted = False
        self._changed = asyncio.Condition()

    async def admit(self, step: int) -> None:
        """Allow sampling up to this step; called by the training."""
        async with self._changed:
            self._admitted = min(step, self._last)
            self._changed.notify_all()

    async def begin(self) -> int:
        """Wait until the next step may be sampled; called by the rollouts."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._next <= self._admitted and not self._halted)
            self._sampling = True
            return self._next

    async def finish(self, batch: Batch | DataLostError) -> None:
        """Hand over the batch of the step that was begun, or say that its rows were lost.

        After a loss nothing is sampled until the training rewinds.
        """
        async with self._changed:
            self._ready[self._next] = batch
            self._next += 1
            self._sampling, self._halted = False, self._halted or isinstance(batch, DataLostError)
            self._changed.notify_all()

    async def get(self, step: int) -> Batch:
        """Wait for the batch of an admitted step; called by the training.

        Raises:
            DataLostError: its rows were lost.
        """
        assert step <= self._admitted, "nobody samples a step that was not admitted"
        async with self._changed:
            await self._changed.wait_for(lambda: step in self._ready)
            batch = self._ready.pop(step)
        if isinstance(batch, DataLostError):
            raise batch
        return batch

    @asynccontextmanager
    async def rewound(self, step: int) -> AsyncGenerator[None]:
        """Drop all batches, and sample again from this step on when the context ends.

        Waits until nothing is being sampled, so that the context can clear all rows.
        """
        async with self._changed:
            self._halted = True
            await self._changed.wait_for(lambda: not self._sampling)
            self._ready.clear()
            self._next = step
        yield
        async with self._changed:
            self._halted = False
            self._changed.notify_all()


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupCounts:
    """What became of the prompts that were rolled out for training.

    Attributes:
        finished: all of them.
        trained: those with a trajectory that was trained on.
        dropped: filtered out, without a score, or lost with a storage unit.
        held: still in the replay buffer.
    """

    finished: int
    trained: int
    dropped: int
    held: int

    def __str__(self) -> str:
        return f"{self.finished} prompts finished = {self.trained} trained + {self.dropped} dropped + {self.held} held"

    def check(self) -> None:
        """Check that every finished prompt was trained on, dropped, or is still held.

        Raises:
            RLError: the numbers contradict each other.
        """
        if self.finished != self.trained + self.dropped + self.held:
            raise RLError(f"The groups of some prompts were lost or used twice: {self} does not add up.")


def staleness(rows: KVBatchMeta, version: int) -> list[int]:
    """[N] versions between the weights that generated each trajectory and `version`.

    Raises:
        RolloutError: a trajectory has no version.
    """
    ages: list[int] = []
    for key, tag in zip(rows.keys, rows.tag_values("version"), strict=True):
        if tag is None:
            raise RolloutError(f"Row {key!r} has no tag `version`: the weights that generated it are unknown.")
        ages.append(version - int(tag))
    return ages
