"""The worker that scores, and turns scores into advantages."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np

from rl_protocol import BatchData, KVBatchMeta, RewardError, RowKey, Tag, dense, ragged
from rl_protocol.ports import DataPlane
from rl_trainer.algorithms.dapo import overlong_penalty, prompts_that_teach
from rl_trainer.algorithms.episodes import FloatArray, IntArray
from rl_trainer.algorithms.kl import adaptive_kl_coef
from rl_trainer.checkpoints.stateful import StatefulWorker, Write
from rl_trainer.columns import BASELINE_PARTITION
from rl_trainer.config import AlgorithmConfig, OverlongConfig, PolicyLossConfig
from rl_trainer.messages import FilterResult, RewardResult, StageCall, StageResult
from rl_trainer.metrics import stats
from rl_trainer.rewards.outcomes import Failure, Outcome, Sample, Scored, Scorer
from rl_trainer.sample_log import SampleLog, SampleRow, TrainSamples
from rl_trainer.scoring import Scoring, estimate_advantages
from rl_trainer.stages import StepGraph
from rl_trainer.validation import Judged, validation_metrics
from rl_trainer.worker import fetch, read, store

STATE = "worker.json"

logger = logging.getLogger(__name__)
MANY = 16
"""Samples after which a function that failed on all of them is held to be broken."""
FAILURE_TAG = "reward_failure"
"""Tag of trajectories without a score: the kind of failure."""


class _State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kl_coef: float


class RewardWorker(StatefulWorker):
    """Scores responses and turns scores into advantages, next to the data and without any model."""

    handlers: ClassVar[Mapping[str, type[msgspec.Struct]]] = {
        "reward": StageCall,
        "evaluate": StageCall,
        "filter": StageCall,
        "baseline": StageCall,
        "adv": StageCall,
        **StatefulWorker.state_handlers,
    }

    def __init__(
        self,
        plane: DataPlane,
        graph: StepGraph,
        scorer: Scorer,
        decode: Callable[[Sequence[int]], str],
        algorithm: AlgorithmConfig,
        response_length: int,
        *,
        policy_loss: PolicyLossConfig | None = None,
        overlong: OverlongConfig | None = None,
        samples: SampleLog | None = None,
        train_samples: TrainSamples | None = None,
        seed: int = 0,
    ) -> None:
        self._plane = plane
        self._graph = graph
        self._scorer = scorer
        self._decode = decode
        self._algorithm = algorithm
        self._response_length = response_length
        self._policy_loss = policy_loss or PolicyLossConfig()
        self._overlong = overlong or OverlongConfig()
        self._samples = samples
        self._train_samples = train_samples
        self._seed = seed
        self._kl_coef = algorithm.kl_ctrl.kl_coef
        self._kl_before = 0, self._kl_coef
        """The step whose advantages were estimated last, and the coefficient that it began with: it may be done again."""

    async def reward(self, call: StageCall) -> RewardResult:
        """Write `scores` and `acc` of the trajectories, and the parts of the reward that the estimator looks at.

        The last trajectory of a session is scored; the others are given its score. Where the reward function fails, the session's trajectories
        get the tag FAILURE_TAG in place of scores, and are named in the answer.

        Raises:
            RewardError: it failed on every one of many sessions: what is wrong is the function, or its settings.
        """
        stage = self._graph["reward"]
        log = self._train_samples
        shown = log is not None and log.due(call.batch, call.step)
        data = await self._fetch(call.batch, prompts=shown)
        final = final_rows(call.batch.keys)
        outcomes = dict(zip(sorted(set(final)), await self._score(call.batch, data, sorted(set(final))), strict=True))
        if log is not None and shown:
            seen = list(outcomes)
            table = self._sample_rows(call.batch.select_rows(seen), data.select_rows(seen), list(outcomes.values()))
            log.write(call.step, table)
        failed = {i: one for i, row in enumerate(final) if isinstance(one := outcomes[row], Failure)}
        metrics = _reward_metrics(list(outcomes.values()))
        if failed:
            tags: list[Tag] = [{FAILURE_TAG: one.kind} for one in failed.values()]
            await self._plane.put(call.batch.partition, [call.batch.keys[i] for i in failed], None, tags=tags)
        good = [i for i in range(len(final)) if i not in failed]
        rows = [_scored(outcomes[final[i]]).numbers for i in good]
        scores = np.array([row["score"] for row in rows], np.float32)
        if self._overlong.buffer_len:
            penalty = self._penalty(data.ragged("responses").lengths[[final[i] for i in good]])
            scores = (scores + penalty).astype(np.float32)
            metrics |= stats("reward/overlong_penalty", penalty, np.array([final[i] == i for i in good], np.bool_))
        columns = BatchData(
            {
                "scores": dense(scores),
                "acc": dense(np.array([row["acc"] for row in rows], np.float32)),
                "reward_components": ragged(
                    [[row[key] for key in self._algorithm.component_keys()] for row in rows], "float32"
                ),
            }
        )
        if good:
            await store(self._plane, call.batch.select_rows(good), stage, data.select_rows(good), columns)
        return RewardResult(
            metrics=metrics,
            failed=tuple(call.batch.keys[i] for i in failed),
            failure=next((one.said for one in failed.values()), ""),
        )

    def _penalty(self, lengths: IntArray) -> FloatArray:
        """[N] what responses of these lengths pay."""
        return overlong_penalty(
            lengths,
            max_length=self._response_length,
            buffer=self._overlong.buffer_len,
            factor=self._overlong.penalty_factor,
        )

    async def filter(self, call: StageCall) -> FilterResult:
        """Name the prompts whose sessions differ in what algorithm.filter_groups.metric says."""
        (name,) = self._graph["filter"].reads
        values = (await self._plane.get(call.batch, [name])).dense(name).values.astype(np.float64)
        return FilterResult(uids=tuple(prompts_that_teach([RowKey.parse(key) for key in call.batch.keys], values)))

    async def evaluate(self, call: StageCall) -> RewardResult:
        """Score validation sessions, report them by data source (see `rl_trainer.validation`), and write them down.

        A session on which the reward function fails counts as wrong, with a score of 0, and is counted in val-aux/<source>/reward_failures.

        Raises:
            RewardError: as `reward`.
        """
        batch = call.batch.select_rows(sorted(set(final_rows(call.batch.keys))))
        data = await self._fetch(batch, prompts=self._samples is not None)
        outcomes = await self._score(batch, data, range(len(batch)))
        sources: list[str] = data.objects("data_source").values()
        uids = [RowKey.parse(key).uid for key in batch.keys]
        judged = [Judged.of(source, uid, outcome) for source, uid, outcome in zip(sources, uids, outcomes, strict=True)]
        if self._samples is not None:
            self._samples.write(call.step, self._sample_rows(batch, data, outcomes))
        failed = [(key, one) for key, one in zip(batch.keys, outcomes, strict=True) if isinstance(one, Failure)]
        return RewardResult(
            metrics=validation_metrics(judged),
            failed=tuple(key for key, _ in failed),
            failure=failed[0][1].said if failed else "",
        )

    def _sample_rows(self, batch: KVBatchMeta, data: BatchData, outcomes: Sequence[Outcome]) -> list[SampleRow]:
        columns = zip(
            batch.keys,
            data.objects("data_source").values(),
            data.ragged("prompts").rows(),
            data.ragged("responses").rows(),
            data.objects("ground_truth").values(),
            outcomes,
            strict=True,
        )
        return [
            SampleRow(
                key=key,
                data_source=source,
                prompt=self._decode(prompt.tolist()),
                response=self._decode(response.tolist()),
                ground_truth=truth,
                outcome=outcome,
            )
            for key, source, prompt, response, truth, outcome in columns
        ]

    async def baseline(self, call: StageCall) -> StageResult:
        """Write `reward_baselines` of every trajectory: the score of the greedy response to its prompt, which has been scored before.

        Where the reward function failed on the greedy response, it is the mean score of the prompt's trajectories.
        """
        uids = [RowKey.parse(key).uid for key in call.batch.keys]
        rows = await self._plane.list_rows(BASELINE_PARTITION)
        scored = [key for key, tag in zip(rows.keys, rows.tags, strict=True) if FAILURE_TAG not in tag]
        greedy = rows.select_keys(scored)  # their scores are there, or a storage unit took them with it
        found = (await self._plane.get(greedy, ["scores"])).dense("scores").values.tolist() if greedy else []
        known = {RowKey.parse(key).uid: float(score) for key, score in zip(greedy.keys, found, strict=True)}
        own = (await self._plane.get(call.batch, ["scores"])).dense("scores").values
        places: dict[str, list[int]] = {}
        for i, uid in enumerate(uids):
            places.setdefault(uid, []).append(i)
        values = {uid: known[uid] if uid in known else float(own[rows].mean()) for uid, rows in places.items()}
        baselines = np.array([values[uid] for uid in uids], np.float32)
        columns = BatchData({"reward_baselines": dense(baselines)})
        await store(self._plane, call.batch, self._graph["baseline"], BatchData({}, len(call.batch)), columns)
        return StageResult(metrics=stats("critic/baseline", baselines))

    async def adv(self, call: StageCall) -> StageResult:
        """Write `advantages`, `returns` and what else the updates read; report the statistics of the batch."""
        stage = self._graph["adv"]
        data = await read(self._plane, call.batch, stage)
        if self._kl_before[0] == call.step:
            self._kl_coef = self._kl_before[1]
        self._kl_before = call.step, self._kl_coef
        scoring = Scoring(
            algorithm=self._algorithm,
            policy_loss=self._policy_loss,
            response_length=self._response_length,
            kl_coef=self._kl_coef,
            rng=np.random.default_rng((self._seed, call.step)),
        )
        columns, metrics = estimate_advantages(call.batch, data, scoring)
        await store(self._plane, call.batch, stage, data, columns)
        control = self._algorithm.kl_ctrl
        if control.type == "adaptive" and "actor/reward_kl_penalty" in metrics:
            kl = metrics["actor/reward_kl_penalty"]
            self._kl_coef = adaptive_kl_coef(
                self._kl_coef, kl, target=control.target_kl, horizon=control.horizon, sequences=len(call.batch)
            )
        return StageResult(metrics=metrics)

    def copy_state(self, part: str) -> Mapping[str, Write]:
        """See StatefulWorker.copy_state: where the adaptive coefficient is."""
        state = _State(kl_coef=self._kl_coef)

        def write(folder: Path) -> Sequence[Path]:
            (folder / STATE).write_bytes(msgspec.json.encode(state))
            return [folder / STATE]

        return {part: write}

    def take_state(self, folder: Path) -> None:
        """See StatefulWorker.take_state."""
        self._kl_coef = msgspec.json.decode((folder / STATE).read_bytes(), type=_State).kl_coef

    async def _fetch(self, batch: KVBatchMeta, *, prompts: bool = False) -> BatchData:
        """What rewards are computed from, with the prompts where these are wanted."""
        wanted = ("prompts",) if prompts or self._scorer.reads_tokens else ()
        return self._graph["reward"].rename(await fetch(self._plane, batch, (*wanted, *self._graph["reward"].reads)))

    async def _score(self, batch: KVBatchMeta, data: BatchData, rows: Sequence[int]) -> list[Outcome]:
        """What the reward function says of the responses in `rows`; what it should have said and did not is a failure."""
        columns = [data.objects(name).values() for name in ("data_source", "ground_truth", "extra_info")]
        responses = data.ragged("responses").rows()
        prompts = data.ragged("prompts").rows() if self._scorer.reads_tokens else None
        samples = [
            Sample(
                data_source=columns[0][row],
                solution_str=self._decode(responses[row].tolist()),
                ground_truth=columns[1][row],
                extra_info=columns[2][row],
                tokens=[] if prompts is None else [*prompts[row].tolist(), *responses[row].tolist()],
            )
            for row in rows
        ]
        outcomes = [self._complete(outcome) for outcome in await self._scorer.score(samples)]
        failures = [
            (batch.keys[row], sample, one)
            for row, sample, one in zip(rows, samples, outcomes, strict=True)
            if isinstance(one, Failure)
        ]
        for key, sample, one in failures:
            logger.warning("reward failed (%s) for sample %r of %r: it %s", one.kind, key, sample.data_source, one.said)
        if len(failures) == len(samples) >= MANY:
            key, sample, first = failures[0]
            raise RewardError(
                f"The reward function failed on all {len(samples)} samples, so it is to blame and not they. For sample {key!r} of "
                f"{sample.data_source!r} it {first.said}."
            )
        return outcomes

    def _complete(self, outcome: Outcome) -> Outcome:
        missing = [
            key
            for key in self._algorithm.component_keys()
            if isinstance(outcome, Scored) and key not in outcome.numbers
        ]
        return Failure(kind="no_number", message=f"returned None as {missing[0]!r}") if missing else outcome


def final_rows(keys: Sequence[str]) -> list[int]:
    """[N] for each trajectory, the row that is scored for its session: the one with the highest index."""
    named = [RowKey.parse(key) for key in keys]
    last: dict[tuple[str, int], int] = {}
    for row, key in enumerate(named):
        known = last.get((key.uid, key.session))
        if known is None or named[known].index < key.index:
            last[key.uid, key.session] = row
    return [last[key.uid, key.session] for key in named]


def _reward_metrics(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Failures by kind, and the mean of every number the function named beside score and acc, over the sessions where it did."""
    kinds = Counter(one.kind for one in outcomes if isinstance(one, Failure))
    metrics = {f"reward/failures/{kind}": float(count) for kind, count in kinds.items()}
    named: dict[str, list[float]] = {}
    for one in outcomes:
        if isinstance(one, Scored):
            for name, value in one.numbers.items():
                named.setdefault(name, []).append(value)
    return metrics | {
        f"reward/extra/{name}": float(np.mean(values)) for name, values in named.items() if name not in ("score", "acc")
    }


def _scored(outcome: Outcome) -> Scored:
    assert isinstance(outcome, Scored), "failures have been set aside"
    return outcome
