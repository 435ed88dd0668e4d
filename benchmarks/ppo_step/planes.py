"""Planes as the driver sees them: `Direct` sends names, `Central` moves the rows itself."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import msgspec
import numpy as np
import ray

from ppo_step.compute import Workload, make_compute
from ppo_step.graph import SCORING_STAGES, step_graph
from ppo_step.payloads import FAMILIES, row_keys, row_lengths
from ppo_step.stores import CARRIERS, PARTITION
from rl_protocol import BatchData, KVBatchMeta, balanced_parts
from rl_protocol.bridge import Declaration
from rl_trainer.workers.messages import StageCall

WAIT_S = 300.0


class Plan:
    """The rows of each worker; the same for every plane.

    Rollout: worker r makes the r-th part. Models: rows are redistributed to equal token counts, as
    verl's balancing does.
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.graph = step_graph(FAMILIES[workload.family])
        lengths = row_lengths(FAMILIES[workload.family], workload.rows, workload.seed)
        self.made = [list(workload.share(rank)) for rank in range(workload.workers)]
        self.dealt = balanced_parts(lengths["prompts"] + lengths["responses"], workload.workers)
        self.order: list[int] = [row for rows in self.dealt for row in rows]

    def keys(self, step: int, rows: Sequence[int]) -> tuple[str, ...]:
        """Metadata of these rows."""
        names = row_keys(step, self.workload.rows)
        return tuple(names[row] for row in rows)

    def call(self, step: int, rows: Sequence[int]) -> bytes:
        """The message that names rows, as the trainer encodes it."""
        meta = KVBatchMeta(partition=PARTITION, keys=self.keys(step, rows))
        return msgspec.msgpack.encode(StageCall(step=step, batch=meta))


class Plane(Protocol):
    """One way to bring columns from stage to stage."""

    name: str
    bytes_moved: int
    """Bytes through the driver: calls, answers and the rows they carry."""

    def load(self, plan: Plan) -> None:
        """Prepare for a point of the comparison."""
        ...

    def run(self, stage: Declaration, step: int) -> None:
        """Run one stage on all its workers."""
        ...

    def finish(self, step: int) -> None:
        """Clear the rows of a step."""
        ...

    def computed(self) -> dict[str, float]:
        """Seconds of each stage on its slowest worker since the last call."""
        ...


def computed_by(workers: Sequence[Any]) -> list[dict[str, float]]:
    """Seconds per stage of every worker."""
    return ray.get([worker.computed.remote() for worker in workers], timeout=WAIT_S)


def longest(seconds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The longest of every stage."""
    names = dict.fromkeys(name for mine in seconds for name in mine)
    return {name: max(mine.get(name, 0.0) for mine in seconds) for name in names}


class Direct:
    """A data plane: the driver sends names; the first worker scores."""

    def __init__(self, name: str, workers: Sequence[Any], kind: str, info: Any) -> None:
        self.name, self.bytes_moved, self._workers = name, 0, workers
        ray.get([worker.connect.remote(name, kind, info) for worker in workers], timeout=WAIT_S)

    def load(self, plan: Plan) -> None:
        self._plan = plan

    def run(self, stage: Declaration, step: int) -> None:
        plan = self._plan
        shares = plan.made if stage.name == "rollout" else plan.dealt
        if stage.name in SCORING_STAGES:
            shares = [plan.order]
        calls = [plan.call(step, rows) for rows in shares]
        refs = [w.run.remote(self.name, stage.name, call) for w, call in zip(self._workers, calls, strict=False)]
        self._count(calls, ray.get(refs, timeout=WAIT_S))

    def finish(self, step: int) -> None:
        call = self._plan.call(step, range(self._plan.workload.rows))
        self._count([call], [ray.get(self._workers[0].clear.remote(self.name, call), timeout=WAIT_S)])

    def computed(self) -> dict[str, float]:
        return longest(computed_by(self._workers[: self._plan.workload.workers]))

    def _count(self, calls: Sequence[bytes], answers: Sequence[bytes]) -> None:
        self.bytes_moved += sum(map(len, calls)) + sum(map(len, answers))


class Central:
    """verl's legacy way: the driver collects, concatenates, reorders, chunks and dispatches.

    Scoring is done in the driver, which has the rows. Only the columns that a stage declares are
    dispatched, and several threads put chunks into Ray's store, as in verl.
    """

    def __init__(self, name: str, workers: Sequence[Any]) -> None:
        self.name, self.bytes_moved, self._workers = name, 0, workers
        self._carrier = CARRIERS[name]
        self._batch: BatchData | None = None

    def load(self, plan: Plan) -> None:
        self._plan = plan
        self._scoring = make_compute(plan.workload, -1)

    def run(self, stage: Declaration, step: int) -> None:
        plan = self._plan
        if stage.name == "rollout":
            made = self._collect(stage, step, plan.made, [None] * len(plan.made))
            self._batch = made.select_rows(plan.order)
            return
        assert self._batch is not None
        read = self._batch.select_fields(stage.reads)
        if stage.name in SCORING_STAGES:
            out = self._scoring.stage(stage, step, plan.keys(step, plan.order), read)
        else:
            out = self._collect(stage, step, plan.dealt, self._dispatch(read))
        self._batch = BatchData({**self._batch.columns, **out.columns}, len(read))

    def finish(self, step: int) -> None:  # noqa: ARG002
        self._batch = None

    def computed(self) -> dict[str, float]:
        mine = dict(self._scoring.seconds)
        self._scoring.seconds.clear()
        return longest([mine, *computed_by(self._workers[: self._plan.workload.workers])])

    def _dispatch(self, batch: BatchData) -> list[Any]:
        """One chunk for each worker, in Ray's store."""
        ends = np.cumsum([len(rows) for rows in self._plan.dealt]).tolist()
        parts = [self._carrier(batch.slice(a, b)) for a, b in itertools.pairwise([0, *ends])]
        self.bytes_moved += sum(part.batch.nbytes for part in parts)
        with ThreadPoolExecutor(min(len(parts), os.cpu_count() or 1)) as threads:
            return list(threads.map(ray.put, parts))

    def _collect(
        self, stage: Declaration, step: int, shares: Sequence[Sequence[int]], carried: Sequence[Any]
    ) -> BatchData:
        calls = [self._plan.call(step, rows) for rows in shares]
        refs = [
            worker.run_with.remote(stage.name, call, self.name, rows)
            for worker, call, rows in zip(self._workers, calls, carried, strict=False)
        ]
        parts = [answer.batch for answer in ray.get(refs, timeout=WAIT_S)]
        self.bytes_moved += sum(map(len, calls)) + sum(part.nbytes for part in parts)
        return BatchData.concat(parts)
