"""What the two pumps of the training loop share: the turns to sample, and the sampled batches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Generator, Mapping, Sequence, Set
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from rl_protocol import DataLostError, KVBatchMeta, RLError, RolloutError
from rl_protocol.counted import counted
from rl_trainer.algorithms.metrics import stats
from rl_trainer.asyncio_tasks import deadline
from rl_trainer.workers.columns import weight_versions

Batch = TypeVar("Batch")
MOST_STAGES = 100
"""Most stages, each with a deadline of its own, between two events that a pump waits for."""


class BatchQueue(Generic[Batch]):
    """Hands the batches of turns from the rollouts to the training; see StalenessPolicy.

    A turn is sampled once the training admits it, so sampling never runs further ahead than the
    training allows. Several admitted turns may be sampled at once.

    Args:
        first: the first turn to sample.
        last: the last one.
        timeout_s: longest time of each wait.
        one_by_one: a turn is begun when the one before is sampled.
        ready: batches of turns before the first, which are sampled already.
    """

    def __init__(
        self,
        first: int,
        last: int,
        timeout_s: float,
        *,
        one_by_one: bool = False,
        ready: Mapping[int, Batch] | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._ready: dict[int, Batch | DataLostError] = dict(ready or {})
        self._next = first
        self._last = last
        self._one_by_one = one_by_one
        self._admitted = first - 1
        self._again: list[int] = []
        """Turns to sample again, before those that follow."""
        self._sampling: set[int] = set()
        self._given: Sequence[int] = ()
        """Turns of the newest batches that the training got."""
        self._halted = False
        self._changed = asyncio.Condition()

    async def admit(self, turn: int) -> None:
        """Allow sampling up to this turn; called by the training."""
        async with self._changed:
            self._admitted = min(turn, self._last)
            self._changed.notify_all()

    async def begin(self) -> int:
        """Wait until the next turn may be sampled; called by the rollouts.

        Raises:
            HangError: it may not within `timeout_s`.
        """
        async with deadline(self._timeout_s, "the training to admit a step"), self._changed:
            await self._changed.wait_for(
                lambda: self._left and not self._halted and not (self._one_by_one and self._sampling)
            )
            if self._again:
                turn = self._again.pop(0)
            else:
                turn, self._next = self._next, self._next + 1
            self._sampling.add(turn)
            return turn

    @property
    def _left(self) -> bool:
        """Whether an admitted turn is not begun."""
        return bool(self._again) or self._next <= self._admitted

    async def finish(self, turn: int, batch: Batch | DataLostError) -> None:
        """Hand over the batch of a turn that was begun, or say that its rows were lost.

        After a loss no turn is begun until the training rewinds.
        """
        async with self._changed:
            self._ready[turn] = batch
            self._sampling.discard(turn)
            self._halted = self._halted or isinstance(batch, DataLostError)
            self._changed.notify_all()

    async def get(self, step: int, select: Callable[[Mapping[int, Batch]], Sequence[int] | None]) -> dict[int, Batch]:
        """Wait for the batches of a step, by turn; called by the training.

        Args:
            step: for messages.
            select: chooses turns among those that are sampled, whenever there is another one; None:
                it waits.

        Raises:
            DataLostError: rows were lost, and nothing else is being sampled.
            HangError: they are not there within `timeout_s`.
        """
        chosen: Sequence[int] | None = None

        def decided() -> bool:
            nonlocal chosen
            chosen = select(self.waiting())
            return chosen is not None or (self._halted and not self._sampling)

        async with deadline(self._timeout_s, f"the batch of step {step}"), self._changed:
            self._given = ()
            await self._changed.wait_for(decided)
            if chosen is None:
                raise next(batch for batch in self._ready.values() if isinstance(batch, DataLostError))
            self._given = chosen
            return self.withdraw(chosen)

    async def sampled(self) -> None:
        """Wait until all admitted turns are sampled, or rows were lost.

        Raises:
            HangError: some are not within `timeout_s`.
        """
        async with deadline(self._timeout_s, "the end of sampling"), self._changed:
            await self._changed.wait_for(lambda: not self._sampling and (not self._left or self._halted))

    def waiting(self) -> dict[int, Batch]:
        """The batches that wait for the training, by turn."""
        return {turn: batch for turn, batch in self._ready.items() if not isinstance(batch, DataLostError)}

    @property
    def sampling(self) -> Set[int]:
        """Turns that were begun and are not sampled."""
        return self._sampling

    @property
    def halted(self) -> bool:
        """Whether rows were lost, and the training has not rewound yet."""
        return self._halted

    def withdraw(self, turns: Sequence[int]) -> dict[int, Batch]:
        """Take batches of turns that wait for the training back, by turn; see `repeat`."""
        batches = self.waiting()
        for turn in turns:
            del self._ready[turn]
        return {turn: batches[turn] for turn in turns}

    async def repeat(self, turns: Collection[int]) -> None:
        """Sample these turns again, before those that follow."""
        async with self._changed:
            self._again = sorted([*self._again, *turns])
            self._changed.notify_all()

    @asynccontextmanager
    async def rewound(self) -> AsyncGenerator[None]:
        """Drop all batches, and sample the turns that were given last and all others again when the
        context ends.

        Waits until nothing is being sampled, so that the context can clear all rows.

        Raises:
            HangError: something is after `timeout_s`.
        """
        async with deadline(self._timeout_s, "the end of sampling"), self._changed:
            self._halted = True
            await self._changed.wait_for(lambda: not self._sampling)
            self._again = sorted([*self._again, *self._given, *self._ready])
            self._ready.clear()
            self._given = ()
        yield
        async with self._changed:
            self._halted = False
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class Validation:
    """The result of a validation."""

    metrics: dict[str, float]
    accuracy: float | None
    """By which checkpoints are compared; None: no response was scored."""


def future_score(beside: asyncio.Task[Validation]) -> asyncio.Future[float | None]:
    """The score of a validation that runs; cancelled if it fails."""
    score = asyncio.get_running_loop().create_future()

    def done(task: asyncio.Task[Validation]) -> None:
        if task.cancelled() or task.exception() is not None:
            score.cancel()
        elif not score.done():
            score.set_result(task.result().accuracy)

    beside.add_done_callback(done)
    return score


class SideValidation:
    """A validation that runs beside the steps after it. Its responses have one version.

    Args:
        timeout_s: longest time of each wait.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._rolled_out = asyncio.Event()
        self._rolled_out.set()
        self._reported: asyncio.Task[None] | None = None

    @contextmanager
    def rolling_out(self) -> Generator[None]:
        """Responses are generated within, so weights must not change."""
        self._rolled_out.clear()
        try:
            yield
        finally:
            self._rolled_out.set()

    async def rolled_out(self) -> None:
        """Wait until no validation generates.

        Raises:
            HangError: one still does after `timeout_s`.
        """
        async with deadline(self._timeout_s, "the responses of the validation"):
            await self._rolled_out.wait()

    def begin(self, reported: asyncio.Task[None]) -> None:
        """A validation has begun; the task ends when its metrics are logged."""
        self._reported = reported

    async def over(self) -> None:
        """Wait until the metrics of the last validation are logged.

        Raises:
            RLError: it failed; HangError: they are not within `timeout_s`.
        """
        if self._reported is not None:
            async with deadline(self._timeout_s, "the validation of an earlier step"):
                await asyncio.shield(self._reported)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupCounts:
    """Outcomes of the prompts that were rolled out for training.

    Attributes:
        finished: all of them, also those that were dropped while they were generated.
        trained: those with a trajectory that was trained on.
        dropped: filtered out, without a score, too old, or lost with a storage unit.
        held: still in the replay buffer.
    """

    finished: int
    trained: int
    dropped: int
    held: int

    def __str__(self) -> str:
        return f"{counted(self.finished, 'prompt')} finished = {self.trained} trained + {self.dropped} dropped + {self.held} held"

    def check(self) -> None:
        """Check that every finished prompt was trained on, dropped, or is still held.

        Raises:
            RLError: the numbers contradict each other.
        """
        if self.finished != self.trained + self.dropped + self.held:
            raise RLError(f"The groups of some prompts were lost or used twice: {self} does not add up.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Admissions:
    """Prompts that the steps have drawn and dropped so far.

    Attributes:
        admitted: drawn.
        refilled: drawn in the place of others, which failed, were not informative or were too old.
        dropped: see GroupCounts.
        continued: those with a response that new weights continued.
        restarted: those with a response that new weights started again.
    """

    admitted: int
    refilled: int
    dropped: int
    continued: int = 0
    restarted: int = 0

    def metrics(self, before: Admissions) -> dict[str, float]:
        """What has changed since."""
        return {
            "async/admitted": float(self.admitted - before.admitted),
            "async/refilled": float(self.refilled - before.refilled),
            "async/dropped": float(self.dropped - before.dropped),
            "async/continued": float(self.continued - before.continued),
            "async/restarted": float(self.restarted - before.restarted),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Staleness:
    """Versions between the weights that generated trajectories and those they train.

    Attributes:
        oldest: [N] of the oldest token of each.
        newest: [N] of the newest token.
    """

    oldest: list[int]
    newest: list[int]

    @classmethod
    def of(cls, rows: KVBatchMeta, version: int) -> Staleness:
        """Of tagged trajectories that train `version`.

        Raises:
            RolloutError: a trajectory has no version.
        """
        oldest, newest = weight_versions(rows.tags or ({},) * len(rows))
        if None in oldest:
            key = rows.keys[oldest.index(None)]
            raise RolloutError(f"Row {key!r} has no tag `version`: the weights that generated it are unknown.")
        ages = version - np.array([oldest, newest], np.int64)
        return cls(oldest=ages[0].tolist(), newest=ages[1].tolist())

    def metrics(self) -> dict[str, float]:
        """Under verl's names."""
        spans = 1 + np.subtract(self.oldest, self.newest)
        return {
            **stats("training/off_policy/trajectory_spans", spans),
            **stats("training/off_policy/trajectory_staleness", self.newest),
            **stats("training/off_policy/trajectory_staleness_worst", self.oldest),
        }


def one_version(rows: KVBatchMeta) -> int:
    """The version that generated all of these tagged trajectories.

    Raises:
        RolloutError: there are several.
    """
    ages = Staleness.of(rows, 0)
    versions = sorted({-age for age in (*ages.oldest, *ages.newest)})
    if len(versions) != 1:
        raise RolloutError(
            f"The responses of one validation have versions {versions} of the weights; it must have one."
        )
    return versions[0]
