"""The driver's side of calls: who gets which rows, and what came back. Names and numbers only."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np

from rl_protocol import BatchError, KVBatchMeta, RLError, balanced_parts
from rl_trainer.algorithms.batching import Schedule, share_out
from rl_trainer.algorithms.episodes import IntArray
from rl_trainer.messages import StageCall, StageResult

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


async def forward(
    ranks: Sequence[WorkerHandle],
    name: str,
    step: int,
    rows: StepRows,
    timeout_s: float,
    shares: Sequence[int] | None = None,
) -> dict[str, float]:
    """A stage in which every row is looked at once: each share is rows of about as many tokens. Metrics are those of the first rank.

    Args:
        ranks: who share the model.
        name: the stage.
        step: number of the step.
        rows: what to look at.
        timeout_s: longest wait.
        shares: of each rank the number of its share, from 0; of ranks with the same one the first writes. None: each has its own.

    Raises:
        BatchError: fewer rows than shares.
        RLError: what a rank raised; the first ends the stage.
    """
    shares = shares or range(len(ranks))
    count = max(shares) + 1
    if len(rows.names) < count:
        raise BatchError(
            f"Stage {name!r} has {len(rows.names)} rows for {count} ranks; raise data.train_batch_size or lower the world size."
        )
    parts = balanced_parts(rows.lengths, count)
    calls = [
        StageCall(step=step, batch=rows.names.select_rows(parts[share]), writes=share not in shares[:rank])
        for rank, share in enumerate(shares)
    ]
    return await _ranks(ranks, name, calls, timeout_s)


async def update(
    ranks: Sequence[WorkerHandle],
    name: str,
    step: int,
    rows: StepRows,
    schedule: Schedule,
    count: int,
    timeout_s: float,
    shares: Sequence[int] | None = None,
) -> dict[str, float]:
    """A stage that optimises: one process is given all rows; several are given their shares of the same mini-batches.

    Args:
        ranks: who share the model.
        name: the stage.
        step: number of the step.
        rows: what to learn from.
        schedule: how rows make up mini-batches.
        count: updates made before this one.
        timeout_s: longest wait.
        shares: see `forward`.

    Raises:
        BatchError: a rank would get no row.
        RLError: what a rank raised; the first ends the stage.
    """
    if len(ranks) == 1:
        return await _ranks(ranks, name, [StageCall(step=step, batch=rows.names)], timeout_s)
    shares = shares or range(len(ranks))
    dealt = share_out(rows.lengths, schedule, count, max(shares) + 1)
    calls = [
        StageCall(step=step, batch=rows.names.select_rows(dealt[i].rows), mini_batches=dealt[i].mini_batches)
        for i in shares
    ]
    return await _ranks(ranks, name, calls, timeout_s)


async def _ranks(
    ranks: Sequence[WorkerHandle], name: str, calls: Sequence[StageCall], timeout_s: float
) -> dict[str, float]:
    answers = await together(
        *(call(rank, name, message, StageResult, timeout_s) for rank, message in zip(ranks, calls, strict=True))
    )
    return answers[0].metrics


async def together(*work: Coroutine[Any, Any, T]) -> list[T]:
    """Run side by side; the first failure cancels the rest and is raised as itself."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(w) for w in work]
    except* RLError as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in running]
