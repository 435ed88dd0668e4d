"""The driver's calls to workers: which rank gets which rows. Names and numbers only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import msgspec
import numpy as np

from rl_protocol import BatchError, KVBatchMeta, balanced_parts
from rl_protocol.counted import counted
from rl_trainer.algorithms.arrays import IntArray
from rl_trainer.algorithms.batching import split_over_ranks
from rl_trainer.algorithms.near_rows import NearRows
from rl_trainer.asyncio_tasks import gather_or_cancel
from rl_trainer.config.optim import Schedule
from rl_trainer.workers.columns import OLD_LOG_PROB, ROLLOUT
from rl_trainer.workers.messages import ReadAheadCall, StageCall, StageResult

T = TypeVar("T")
Answer = TypeVar("Answer", bound=msgspec.Struct)


class WorkerHandle(Protocol):
    """A worker in another process. `bytes_moved` counts all bytes of its requests and answers."""

    @property
    def name(self) -> str:
        """Name of the worker, for messages."""
        ...

    @property
    def process(self) -> object:
        """The worker's process. Workers of the same process have the same, and compute in turn."""
        ...

    @property
    def bytes_moved(self) -> int:
        """Bytes so far."""
        ...

    async def call(self, method: str, payload: bytes, *, timeout_s: float) -> bytes:
        """Run a handler of the worker.

        Raises:
            WorkerError: the worker failed or did not answer in time; WorkerDiedError if its process
                is gone.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Workers:
    """The workers of a run.

    Several actors, references or critics are the ranks of one model, in rank order.
    """

    rollout: Sequence[WorkerHandle]
    reward: WorkerHandle
    actor: Sequence[WorkerHandle]
    dp_ranks: Sequence[int] = ()
    """Data-parallel rank of each actor, and of each reference and critic, from 0.

    Ranks that share one replica of the model have the same one, and compute the same rows. Empty:
    all differ.
    """
    ref: Sequence[WorkerHandle] = ()
    """Empty: no reference. The actors themselves: they can compute initial log-probs."""
    critic: Sequence[WorkerHandle] = ()

    hosts: Mapping[object, str] = field(default_factory=dict[object, str])
    """Host of each process (`WorkerHandle.process`), as the data plane names it; empty: all are on
    one host.
    """

    def dp_ranks_of(self, ranks: Sequence[WorkerHandle]) -> Sequence[int]:
        """`dp_ranks`, or a separate one for each of these ranks."""
        return self.dp_ranks or range(len(ranks))

    def hosts_of(self, ranks: Sequence[WorkerHandle]) -> list[str]:
        """Host of each data-parallel rank: that of the first of its ranks, which reads its rows."""
        first: dict[int, WorkerHandle] = {}
        for dp_rank, rank in zip(self.dp_ranks_of(ranks), ranks, strict=True):
            first.setdefault(dp_rank, rank)
        return [self.hosts.get(first[dp_rank].process, "") for dp_rank in sorted(first)]

    def all(self) -> list[WorkerHandle]:
        """Every worker once."""
        return list({id(w): w for w in (*self.rollout, self.reward, *self.actor, *self.ref, *self.critic)}.values())


@dataclass(frozen=True, kw_only=True)
class PlacedRows:
    """Where the rows of a step are.

    Attributes:
        hosts: [H] names of hosts.
        nbytes: [N, H] bytes of each row on each host.
        slack: see `NearRows`.
    """

    hosts: Sequence[str]
    nbytes: IntArray
    slack: float

    def near(self, ranks: Sequence[str]) -> NearRows:
        """Which rows are near which ranks, by the host of each data-parallel rank."""
        columns = {host: self.nbytes[:, number] for number, host in enumerate(self.hosts)}
        nowhere = np.zeros(len(self.nbytes), np.int64)
        return NearRows(nbytes=np.stack([columns.get(host, nowhere) for host in ranks], axis=1), slack=self.slack)


@dataclass(frozen=True, kw_only=True)
class StepRows:
    """The trajectories of a step: their names, without tags, and their lengths."""

    names: KVBatchMeta
    lengths: IntArray
    """[N] tokens, prompt and response."""
    placed: PlacedRows | None = None
    """None: any rank may get any row."""

    @classmethod
    def of(cls, tagged: KVBatchMeta) -> StepRows:
        """From the tags that rollout workers give."""
        prompts, responses = (np.array(tagged.tag_values(name), np.int64) for name in ("prompt_len", "response_len"))
        return cls(names=tagged.without_tags(), lengths=prompts + responses)

    def select(self, rows: Sequence[int]) -> StepRows:
        """Some of them, by number."""
        placed = self.placed and replace(self.placed, nbytes=self.placed.nbytes[list(rows)])
        return StepRows(names=self.names.select_rows(rows), lengths=self.lengths[list(rows)], placed=placed)

    def near(self, ranks: Sequence[str]) -> NearRows | None:
        """Which rows are near which ranks, by the host of each data-parallel rank; None: it makes
        no difference.
        """
        return self.placed.near(ranks) if self.placed is not None and len(set(ranks)) > 1 else None

    @property
    def has_rollout_log_probs(self) -> bool:
        """Whether the step takes the rollout engine's log-probs for the old ones."""
        return self.names.extra_info.get(OLD_LOG_PROB) == ROLLOUT

    def with_rollout_log_probs(self) -> StepRows:
        """The rows of a step that takes the rollout engine's log-probs for the old ones."""
        names = replace(self.names, extra_info={**self.names.extra_info, OLD_LOG_PROB: ROLLOUT})
        return replace(self, names=names)


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
    name: str,
    step: int,
    rows: StepRows,
    ranks: int,
    dp_ranks: Sequence[int] | None = None,
    hosts: Sequence[str] = (),
) -> list[StageCall]:
    """Calls of a stage that computes every row once.

    Each data-parallel rank gets about as many tokens; see `NearRows` for rows whose hosts are
    known.

    Args:
        name: the stage.
        step: number of the step.
        rows: the rows.
        ranks: number of ranks of the model.
        dp_ranks: data-parallel rank of each rank; those with the same one get the same rows, which
            the first of them reads and writes. None: all differ.
        hosts: host of each data-parallel rank; empty: all are on one.

    Raises:
        BatchError: fewer rows than data-parallel ranks.
    """
    dp_ranks = dp_ranks or range(ranks)
    count = max(dp_ranks) + 1
    if len(rows.names) < count:
        raise BatchError(
            f"Stage {name!r} has {counted(len(rows.names), 'row')} for {counted(count, 'rank')}; raise PromptOrder.batch_size, or use fewer ranks."
        )
    parts = balanced_parts(rows.lengths, count)
    if near := rows.near(hosts):
        parts = [part for (part,) in near.deal(rows.lengths, [[part] for part in parts])]
    return [StageCall(step=step, batch=rows.names.select_rows(parts[dp_rank])) for dp_rank in dp_ranks]


def update_calls(
    step: int,
    rows: StepRows,
    schedule: Schedule,
    count: int,
    ranks: int,
    dp_ranks: Sequence[int] | None = None,
    hosts: Sequence[str] = (),
) -> list[StageCall]:
    """Calls of an update.

    A single process gets all rows; several get parts of the same mini-batches.

    Args:
        step: number of the step.
        rows: the rows.
        schedule: how rows form mini-batches.
        count: updates made before this one.
        ranks: number of ranks of the model.
        dp_ranks: see `forward_calls`.
        hosts: see `forward_calls`.

    Raises:
        BatchError: a rank would get no row.
    """
    if ranks == 1:
        return [StageCall(step=step, batch=rows.names, updates=count)]
    dp_ranks = dp_ranks or range(ranks)
    dealt = split_over_ranks(rows.lengths, schedule, count, max(dp_ranks) + 1, rows.near(hosts))
    return [
        StageCall(
            step=step,
            batch=rows.names.select_rows(dealt[i].rows),
            mini_batches=dealt[i].mini_batches,
            updates=count,
        )
        for i in dp_ranks
    ]


async def read_ahead(ranks: Sequence[WorkerHandle], name: str, calls: Sequence[StageCall], timeout_s: float) -> None:
    """Have every rank read its rows of a stage, so that no rank waits in the stage for another.

    Raises:
        DataLostError: rows of a rank were lost; no rank has begun.
        RLError: a rank failed.
    """
    reads = [ReadAheadCall(stage=name, batch=message.batch) for message in calls]
    await gather_or_cancel(
        *(call(rank, "read_ahead", read, StageResult, timeout_s) for rank, read in zip(ranks, reads, strict=True))
    )


async def run_stage(
    ranks: Sequence[WorkerHandle], name: str, calls: Sequence[StageCall], timeout_s: float
) -> dict[str, float]:
    """Run a stage; returns the metrics of the first rank, with those of the devices over all ranks.

    Raises:
        RLError: a rank failed; the first failure ends the stage.
    """
    results = await call_ranks(ranks, name, calls, StageResult, timeout_s)
    return results[0].metrics | _of_devices([result.metrics for result in results])


def _of_devices(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean over the ranks of how much of its device a rank uses, and the largest memory."""
    first, found = metrics[0], dict[str, float]()
    for name in first:
        if name.startswith("perf/mfu/"):
            found[name] = sum(of_rank.get(name, 0.0) for of_rank in metrics) / len(metrics)
        elif name.startswith("perf/max_memory_"):
            found[name] = max(of_rank.get(name, 0.0) for of_rank in metrics)
    return found


async def call_ranks(
    ranks: Sequence[WorkerHandle], name: str, calls: Sequence[StageCall], answer: type[Answer], timeout_s: float
) -> list[Answer]:
    """Run a stage; returns the answer of each rank.

    Raises:
        RLError: a rank failed; the first failure ends the stage.
    """
    return await gather_or_cancel(
        *(call(rank, name, message, answer, timeout_s) for rank, message in zip(ranks, calls, strict=True))
    )
