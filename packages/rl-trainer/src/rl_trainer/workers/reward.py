"""The worker that scores responses and computes advantages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import fsum
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np

from rl_protocol import BatchData, KVBatchMeta, RowKey, Tag, dense, ragged
from rl_protocol.bridge import Fetched, Output, tqbridge
from rl_protocol.ports import DataPlane
from rl_trainer.algorithms.arrays import FloatArray, IntArray
from rl_trainer.algorithms.dapo import overlong_penalty
from rl_trainer.algorithms.metrics import stats
from rl_trainer.checkpoints.resumable import Write
from rl_trainer.rewards.scorer import Failure, Outcome, Scored, Scorer
from rl_trainer.rewards.validation_metrics import ScoredSession, mean_accuracy, validation_metrics
from rl_trainer.workers.advantage import FAILURE_TAG, AdvantageStages
from rl_trainer.workers.base import with_prompts
from rl_trainer.workers.columns import TASK_COLUMNS, TRAINER_SCHEMA, StepColumns
from rl_trainer.workers.messages import (
    CopyRowsCall,
    FilterResult,
    KeepRowsCall,
    PutRowsCall,
    RewardResult,
    SavedFiles,
    StageCall,
    StageResult,
    ValidationResult,
)
from rl_trainer.workers.sample_log import SampleLog
from rl_trainer.workers.saved_rows import RowFiles
from rl_trainer.workers.scoring import (
    Measured,
    ResponseScorer,
    RewardSettings,
    final_rows,
    outcome_metrics,
    source_scores,
)
from rl_trainer.workers.stateful import StatefulWorker
from rl_trainer.workers.trajectory_record import TrajectoryRecord

STATE = "worker.json"


class _State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kl_coef: float
    role_means: dict[str, float] = {}


class RewardWorker(StatefulWorker):
    """Scores responses and turns scores into advantages, without any model.

    Args:
        plane: where the rows are.
        columns: the columns of the run.
        scorer: the reward function.
        decode: token ids to text, without special tokens.
        settings: see RewardSettings.
        samples: writes validation responses to files; None: they are not written.
        record: records training trajectories; None: none.
    """

    handlers: ClassVar[Mapping[str, type[msgspec.Struct]]] = {
        "reward": StageCall,
        "score_ahead": StageCall,
        "evaluate": StageCall,
        "filter": StageCall,
        "baseline": StageCall,
        "adv": StageCall,
        "copy_rows": CopyRowsCall,
        "keep_rows": KeepRowsCall,
        "put_rows": PutRowsCall,
        **StatefulWorker.state_handlers,
    }

    def __init__(
        self,
        plane: DataPlane,
        columns: StepColumns,
        scorer: Scorer,
        decode: Callable[[Sequence[int]], str],
        settings: RewardSettings,
        *,
        samples: SampleLog | None = None,
        record: TrajectoryRecord | None = None,
    ) -> None:
        self.plane = with_prompts(plane)
        self.columns = columns
        self._settings = settings
        self._responses = ResponseScorer(scorer, decode, settings.algorithm.gdpo_reward_keys)
        self._advantages = AdvantageStages(plane, columns, settings, record)
        self._row_files = RowFiles(plane)
        self._samples = samples
        self._record = record
        self._sources = set[str]()
        """The data sources of rows that have been scored."""

    @tqbridge(
        reads=lambda step: ("responses", *TASK_COLUMNS, *step.demonstration),
        writes=lambda step: ("scores", "acc", *step.reward_components),
        schema=TRAINER_SCHEMA,
    )
    async def reward(self, data: BatchData, call: StageCall) -> Output[RewardResult]:
        """Write `scores`, `acc` and the reward components of the trajectories.

        The last trajectory of a session is scored; the others get its score. Where the reward
        function fails, the session's trajectories get FAILURE_TAG instead of scores, and the result
        names them.

        Raises:
            RewardError: the function failed on every one of many sessions.
        """
        data = await self._with_prompts(data, call.batch, logged=False)
        final = final_rows(call.batch.keys)
        rows = sorted(set(final))
        outcomes = dict(zip(rows, await self._responses.score(call.batch, data, rows), strict=True))
        if self._record is not None and self._record.due(call.batch, call.step):
            await self._record.scored(call.batch, call.step, [outcomes[row] for row in final])
        failed = {i: one for i, row in enumerate(final) if isinstance(one := outcomes[row], Failure)}
        metrics, sizes = outcome_metrics(list(outcomes.values()))
        if failed:
            tags: list[Tag] = [{FAILURE_TAG: one.kind} for one in failed.values()]
            await self.plane.put(call.batch.partition, [call.batch.keys[i] for i in failed], None, tags=tags)
        good = [i for i in range(len(final)) if i not in failed]
        numbers = [_scored(outcomes[final[i]]).numbers for i in good]
        scores = np.array([row["score"] for row in numbers], np.float32)
        penalty = np.zeros(len(scores), np.float32)
        if self._settings.overlong.buffer_len:
            penalty = self._overlong_penalty(data.ragged("responses").lengths[[final[i] for i in good]])
            scores = (scores + penalty).astype(np.float32)
            scored_rows = np.array([final[i] == i for i in good], np.bool_)
            metrics |= stats("reward/overlong_penalty", penalty, scored_rows)
            sizes["reward/overlong_penalty/mean"] = int(scored_rows.sum())
        if not self._settings.algorithm.by_source:
            scored = {final[i]: float(score) for i, score in zip(good, scores, strict=True)}
            by_source = self._by_source(data.objects("data_source").values(), scored)
            metrics, sizes = metrics | by_source[0], sizes | by_source[1]
        columns = BatchData(
            {"scores": dense(scores), "acc": dense(np.array([row["acc"] for row in numbers], np.float32))}
        )
        if components := self._settings.algorithm.gdpo_reward_keys:
            parts = ragged(
                [
                    [row[key] + (float(extra) if key == "score" else 0.0) for key in components]
                    for row, extra in zip(numbers, penalty, strict=True)
                ],
                "float32",
            )
            columns = columns.union(BatchData({"reward_components": parts}))
        given = _given(data, len(call.batch))
        result = RewardResult(
            metrics=metrics,
            sizes=sizes,
            failed=tuple(call.batch.keys[i] for i in failed),
            failure=_examples(failed.values()),
            prompt_scores=_by_prompt(
                {call.batch.keys[final[i]]: float(scores[k]) for k, i in enumerate(good) if not given[final[i]]}
            ),
        )
        return Output(columns=columns if good else None, rows=good, result=result)

    @tqbridge(reads=("responses", *TASK_COLUMNS))
    async def score_ahead(self, data: BatchData, call: StageCall) -> StageResult:
        """Begin to score trajectories, whose `reward` or `evaluate` follows, while others are
        generated.
        """
        data = await self._with_prompts(data, call.batch, logged=False)
        self._responses.begin(call.batch, data, sorted(set(final_rows(call.batch.keys))))
        return StageResult()

    @tqbridge(reads=("responses", *TASK_COLUMNS))
    async def evaluate(self, data: BatchData, call: StageCall) -> ValidationResult:
        """Score validation sessions, report them by data source and write them to the sample log.

        A session on which the reward function fails counts as wrong, with score 0, and is counted
        in val-aux/<source>/reward_failures.

        Raises:
            RewardError: as in `reward`.
        """
        rows = sorted(set(final_rows(call.batch.keys)))
        batch = call.batch.select_rows(rows)
        data = await self._with_prompts(data.select_rows(rows), batch, logged=self._samples is not None)
        outcomes = await self._responses.score(batch, data, range(len(batch)))
        sources: list[str] = data.objects("data_source").values()
        uids = [RowKey.parse(key).uid for key in batch.keys]
        judged = [
            ScoredSession.of(source, uid, outcome) for source, uid, outcome in zip(sources, uids, outcomes, strict=True)
        ]
        if self._samples is not None:
            self._samples.write(call.step, self._responses.sample_rows(batch, data, outcomes))
        failed = [(key, one) for key, one in zip(batch.keys, outcomes, strict=True) if isinstance(one, Failure)]
        return ValidationResult(
            metrics=validation_metrics(judged),
            accuracy=mean_accuracy(judged),
            failed=tuple(key for key, _ in failed),
            failure=_examples([one for _, one in failed]),
        )

    @tqbridge(reads=("prompts",))
    async def prompts(self, data: BatchData) -> BatchData:
        """The prompts of the rows."""
        return data

    async def filter(self, rows: KVBatchMeta | Fetched, call: StageCall) -> FilterResult:
        return await self._advantages.filter(rows, call)

    async def baseline(self, rows: KVBatchMeta | Fetched, call: StageCall) -> StageResult:
        return await self._advantages.baseline(rows, call)

    async def adv(self, rows: KVBatchMeta | Fetched, call: StageCall) -> StageResult:
        return await self._advantages.adv(rows, call)

    async def copy_rows(self, call: CopyRowsCall) -> StageResult:
        return await self._row_files.copy(call)

    async def keep_rows(self, call: KeepRowsCall) -> SavedFiles:
        return await self._row_files.keep(call)

    async def put_rows(self, call: PutRowsCall) -> StageResult:
        return await self._row_files.put(call)

    def copy_state(self, part: str) -> Mapping[str, Write]:
        state = _State(kl_coef=self._advantages.kl_coef, role_means=dict(self._advantages.role_means))

        def write(folder: Path) -> Sequence[Path]:
            (folder / STATE).write_bytes(msgspec.json.encode(state))
            return [folder / STATE]

        return {part: write, **self._row_files.take_writes()}

    def take_state(self, folder: Path) -> None:
        state = msgspec.json.decode((folder / STATE).read_bytes(), type=_State)
        self._advantages.kl_coef, self._advantages.role_means = state.kl_coef, state.role_means

    async def _with_prompts(self, data: BatchData, batch: KVBatchMeta, *, logged: bool) -> BatchData:
        """The columns, and the prompts if samples are logged or the reward function reads them."""
        if not (logged or self._responses.reads_prompts):
            return data
        return data.union(await self.prompts(batch))

    def _by_source(self, sources: Sequence[str], scored: Mapping[int, float]) -> Measured:
        """Metrics of the scores by row, once rows of several data sources have been scored.

        With answers of the data among the rows there are none: the stage `adv` tells them apart.
        """
        self._sources.update(sources)
        several = len(self._sources) > 1 and not self._settings.algorithm.demonstrates
        return source_scores(sources, scored) if several else ({}, {})

    def _overlong_penalty(self, lengths: IntArray) -> FloatArray:
        """[N] penalties of responses of these lengths, at most 0."""
        overlong = self._settings.overlong
        return overlong_penalty(
            lengths,
            max_length=self._settings.response_length,
            buffer=overlong.buffer_len,
            factor=overlong.penalty_factor,
        )


def _scored(outcome: Outcome) -> Scored:
    assert isinstance(outcome, Scored), "failures are handled before"
    return outcome


def _given(data: BatchData, rows: int) -> list[bool]:
    """Which rows are answers of the data, which the policy has not generated."""
    if "demonstration" not in data:
        return [False] * rows
    return [bool(row.any()) for row in data.ragged("demonstration").rows()]


def _by_prompt(scores: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Mean and variance of the scores of each prompt, from those of its sessions by row key.

    >>> _by_prompt({"a/0/0": 1.0, "a/1/0": 0.0, "b/0/0": 0.5})
    {'a': (0.5, 0.25), 'b': (0.5, 0.0)}
    """
    groups: dict[str, list[float]] = {}
    for key, score in scores.items():
        groups.setdefault(RowKey.parse(key).uid, []).append(score)
    found: dict[str, tuple[float, float]] = {}
    for uid, group in groups.items():  # too few numbers for numpy
        mean = fsum(group) / len(group)
        found[uid] = mean, fsum((score - mean) ** 2 for score in group) / len(group)
    return found


def _examples(failures: Iterable[Failure]) -> str:
    """The first failure of each kind."""
    first: dict[str, str] = {}
    for one in failures:
        first.setdefault(one.kind, one.description)
    return "; it ".join(first.values())
