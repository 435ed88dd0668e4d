"""The driver's side of calls: who gets which rows, and what came back. Names and numbers only."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import msgspec
import numpy as np

from rl_protocol import BatchError, DataLostError, KVBatchMeta, RLError, balanced_parts
from rl_trainer.algorithms.batching import Schedule, share_out
from rl_trainer.algorithms.episodes import IntArray
from rl_trainer.messages import ReadAheadCall, StageCall, StageResult

T = TypeVar("T")
Answer = TypeVar("Answer", bound=msgspec.Struct)


class WorkerHandle(Protocol):
    """A worker in another process; `bytes_moved` counts every byte of requests and answers that went through the driver."""

    @property
    def name(self) -> str:
        """Of the worker, for messages."""
        ...

    @property
    def bytes_moved(self) -> int:
        """Bytes so far."""
        ...

    async def call(self, method: str, payload: bytes, *, timeout_s: float) -> bytes:
        """Run a handler of the worker.

        Raises:
            WorkerError: the worker failed or did not answer in time; a WorkerDiedError when its process is gone.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Who does what. Several actors, references or critics are the ranks that share one model, in the order of their ranks."""

    rollout: Sequence[WorkerHandle]
    reward: WorkerHandle
    actor: Sequence[WorkerHandle]
    replicas: Sequence[int] = ()
    """Of each actor, and of each reference and critic, the number of its share of the rows, from 0: those that share one replica of the model
    compute with the same rows. None: each has rows of its own."""
    ref: Sequence[WorkerHandle] = ()
    """None: there is no reference; the actors themselves: they know what they were before training."""
    critic: Sequence[WorkerHandle] = ()

    def shares(self, ranks: Sequence[WorkerHandle]) -> Sequence[int]:
        """`replicas`, or a share for each of these ranks."""
        return self.replicas or range(len(ranks))

    def all(self) -> list[WorkerHandle]:
        """Every worker once."""
        return list({id(w): w for w in (*self.rollout, self.reward, *self.actor, *self.ref, *self.critic)}.values())


@dataclass(frozen=True, kw_only=True)
class StepRows:
    """The trajectories of a step: their names, without tags, and their lengths."""

    names: KVBatchMeta
    lengths: IntArray
    """[N] tokens, prompt and response."""

    @classmethod
    def of(cls, tagged: KVBatchMeta) -> StepRows:
        """From the tags that rollout workers give."""
        lengths = [
            int(p or 0) + int(r or 0)
            for p, r in zip(tagged.tag_values("prompt_len"), tagged.tag_values("response_len"), strict=True)
        ]
        return cls(names=tagged.without_tags(), lengths=np.array(lengths, dtype=np.int64))


async def call(
    worker: WorkerHandle, method: str, message: msgspec.Struct, answer: type[Answer], timeout_s: float
) -> Answer:
    """Call one worker.

    Raises:
        WorkerError: see WorkerHandle.call.
    """
    payload = await worker.call(method, msgspec.msgpack.encode(message), timeout_s=timeout_s)
    return msgspec.msgpack.decode(payload, type=answer)


def forward_calls(
    name: str, step: int, rows: StepRows, ranks: int, shares: Sequence[int] | None = None
) -> list[StageCall]:
    """Calls of a stage in which every row is looked at once: each share is rows of about as many tokens.

    Args:
        name: the stage.
        step: number of the step.
        rows: what to look at.
        ranks: how many share the model.
        shares: of each rank the number of its share, from 0; of ranks with the same one the first writes. None: each has its own.

    Raises:
        BatchError: fewer rows than shares.
    """
    shares = shares or range(ranks)
    count = max(shares) + 1
    if len(rows.names) < count:
        raise BatchError(
            f"Stage {name!r} has {len(rows.names)} rows for {count} ranks; raise data.train_batch_size or lower the world size."
        )
    parts = balanced_parts(rows.lengths, count)
    return [
        StageCall(step=step, batch=rows.names.select_rows(parts[share]), writes=share not in shares[:rank])
        for rank, share in enumerate(shares)
    ]


def update_calls(
    step: int, rows: StepRows, schedule: Schedule, count: int, ranks: int, shares: Sequence[int] | None = None
) -> list[StageCall]:
    """Calls of a stage that optimizes: one process is given all rows; several are given their shares of the same mini-batches.

    Args:
        step: number of the step.
        rows: what to learn from.
        schedule: how rows make up mini-batches.
        count: updates made before this one.
        ranks: how many share the model.
        shares: see `forward_calls`.

    Raises:
        BatchError: a rank would get no row.
    """
    if ranks == 1:
        return [StageCall(step=step, batch=rows.names)]
    shares = shares or range(ranks)
    dealt = share_out(rows.lengths, schedule, count, max(shares) + 1)
    return [
        StageCall(step=step, batch=rows.names.select_rows(dealt[i].rows), mini_batches=dealt[i].mini_batches)
        for i in shares
    ]


async def read_ahead(ranks: Sequence[WorkerHandle], name: str, calls: Sequence[StageCall], timeout_s: float) -> None:
    """Have every rank read what its call of a stage needs, so that no rank waits in the stage for one that lacks rows.

    Raises:
        DataLostError: rows of a rank were lost; no rank has begun.
        RLError: what a rank raised.
    """
    reads = [ReadAheadCall(stage=name, batch=message.batch) for message in calls]
    await together(
        *(call(rank, "read_ahead", read, StageResult, timeout_s) for rank, read in zip(ranks, reads, strict=True))
    )


async def run_stage(
    ranks: Sequence[WorkerHandle], name: str, calls: Sequence[StageCall], timeout_s: float
) -> dict[str, float]:
    """Run a stage; the metrics are those of the first rank.

    Raises:
        RLError: what a rank raised; the first ends the stage.
    """
    answers = await together(
        *(call(rank, name, message, StageResult, timeout_s) for rank, message in zip(ranks, calls, strict=True))
    )
    return answers[0].metrics


async def together(*work: Coroutine[Any, Any, T]) -> list[T]:
    """Run side by side; the first failure cancels the rest and is raised as itself.

    A DataLostError waits for the rest instead: the step may be done again, and no call of its first attempt may write rows by then.
    """
    lost: list[DataLostError] = []

    async def run(one: Coroutine[Any, Any, T]) -> T | None:
        try:
            return await one
        except DataLostError as error:
            lost.append(error)
            return None

    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(run(w)) for w in work]
    except* RLError as failed:
        raise failed.exceptions[0] from None
    if lost:
        raise lost[0]
    return [cast("T", task.result()) for task in running]
