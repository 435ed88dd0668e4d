"""Scores responses with a reward function, for the reward worker."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from rl_protocol import BatchData, KVBatchMeta, RewardError, RowKey
from rl_trainer.algorithms.metrics import stats
from rl_trainer.config import AlgorithmConfig, OverlongConfig, PolicyLossConfig
from rl_trainer.rewards.scorer import Failure, Outcome, Sample, Scored, Scorer
from rl_trainer.workers.sample_log import SampleRow

logger = logging.getLogger(__name__)
Measured: TypeAlias = tuple[dict[str, float], dict[str, int]]
"""Metrics by name, and of each mean among them, how many numbers it is of."""
MOST_AHEAD = 1 << 16
"""Scores that are kept for calls of `score` that have not come."""
BROKEN_AFTER = 16
"""A reward function that fails on all of at least this many samples is taken to be broken. Until it
has scored a sample, it gets so many of a batch first."""


@dataclass(frozen=True, kw_only=True)
class RewardSettings:
    """Settings of the reward worker.

    Attributes:
        algorithm: estimator, discount, KL and correction settings.
        response_length: most tokens of a response.
        policy_loss: says which tokens are chosen for the loss.
        overlong: penalty of responses near that length.
        seed: seed of the run, from which tokens are chosen at random.
    """

    algorithm: AlgorithmConfig
    response_length: int
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    seed: int = 0


@dataclass(frozen=True, slots=True)
class _Ahead:
    """The score of a sample, which is computed."""

    sample: Sample
    task: asyncio.Task[list[Outcome]]
    place: int
    """Of the sample in the task's result."""


class ResponseScorer:
    """Decodes responses and calls the reward function.

    Args:
        scorer: the reward function.
        decode: token ids to text, without special tokens.
        components: names that the reward function must return beside `score` and `acc`.
    """

    def __init__(
        self,
        scorer: Scorer,
        decode: Callable[[Sequence[int]], str],
        components: Sequence[str],
    ) -> None:
        self._scorer = scorer
        self._decode = decode
        self._components = components
        self._ahead: dict[tuple[str, str], _Ahead] = {}
        """Scores that were begun, by partition and key."""
        self._works = False
        """The reward function has scored a sample."""

    def begin(self, batch: KVBatchMeta, data: BatchData, rows: Sequence[int]) -> None:
        """Begin to score the responses in `rows`, for a call of `score` that follows.

        Does nothing for a scorer that compares the samples of a call.
        """
        if self._scorer.compares:
            return
        samples = self._samples(data, rows)
        task = asyncio.create_task(self._scorer.score(samples))
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # `score` raises it
        for place, (row, sample) in enumerate(zip(rows, samples, strict=True)):
            self._ahead[batch.partition, batch.keys[row]] = _Ahead(sample, task, place)
        for old in list(self._ahead)[: max(0, len(self._ahead) - MOST_AHEAD)]:
            del self._ahead[old]

    @property
    def reads_prompts(self) -> bool:
        """Whether `score` needs the column `prompts`."""
        return self._scorer.reads_tokens

    async def score(self, batch: KVBatchMeta, data: BatchData, rows: Sequence[int]) -> list[Outcome]:
        """Score the responses in `rows`. A result that lacks a component is a failure.

        Raises:
            RewardError: the function failed on all of at least BROKEN_AFTER samples.
        """
        samples = self._samples(data, rows)
        ahead = [self._ahead.pop((batch.partition, batch.keys[row]), None) for row in rows]
        pairs = list(zip(samples, ahead, strict=True))
        begun = [one if one is not None and one.sample == sample else None for sample, one in pairs]
        rest = [sample for sample, one in zip(samples, begun, strict=True) if one is None]
        keys = [batch.keys[row] for row in rows]
        scored = iter(await self._score(rest, [key for key, one in zip(keys, begun, strict=True) if one is None]))
        outcomes = [next(scored) if one is None else self._complete((await one.task)[one.place]) for one in begun]
        self._check(keys, samples, outcomes)
        return outcomes

    async def _score(self, samples: Sequence[Sample], keys: Sequence[str]) -> list[Outcome]:
        """Score samples, some of them first if the function may be broken.

        So a function that hangs or ends its process fails after those few, not after the time
        limits of a whole validation. They are spread over the batch, which may be sorted.
        """
        if self._works or self._scorer.compares or len(samples) <= BROKEN_AFTER:
            return await self._call(samples)
        first = [i * len(samples) // BROKEN_AFTER for i in range(BROKEN_AFTER)]
        tried = [samples[i] for i in first]
        outcomes = dict(zip(first, await self._call(tried), strict=True))
        if all(isinstance(one, Failure) for one in outcomes.values()):
            self._check([keys[i] for i in first], tried, list(outcomes.values()))
        rest = [i for i in range(len(samples)) if i not in outcomes]
        outcomes |= zip(rest, await self._call([samples[i] for i in rest]), strict=True)
        return [outcomes[i] for i in range(len(samples))]

    async def _call(self, samples: Sequence[Sample]) -> list[Outcome]:
        return [self._complete(one) for one in await self._scorer.score(samples)] if samples else []

    def _check(self, keys: Sequence[str], samples: Sequence[Sample], outcomes: Sequence[Outcome]) -> None:
        """Log failures; raise RewardError if these are all, and at least BROKEN_AFTER."""
        failures = [
            (key, sample, one)
            for key, sample, one in zip(keys, samples, outcomes, strict=True)
            if isinstance(one, Failure)
        ]
        self._works = self._works or len(failures) < len(samples)
        for key, sample, one in failures:
            logger.warning(
                "reward failed (%s) for sample %r of %r: it %s", one.kind, key, sample.data_source, one.description
            )
        if len(failures) == len(samples) >= BROKEN_AFTER:
            key, sample, first = failures[0]
            raise RewardError(
                f"The reward function failed on all {len(samples)} samples that it got, which points to a bug in the function or "
                f"to its settings. For sample {key!r} of {sample.data_source!r} it {first.description}."
            )

    def sample_rows(self, batch: KVBatchMeta, data: BatchData, outcomes: Sequence[Outcome]) -> list[SampleRow]:
        """The rows of a sample table: prompts and responses as text, with their outcomes."""
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

    def _samples(self, data: BatchData, rows: Sequence[int]) -> list[Sample]:
        columns = [data.objects(name).values() for name in ("data_source", "ground_truth", "extra_info")]
        responses = data.ragged("responses").rows()
        prompts = data.ragged("prompts").rows() if self._scorer.reads_tokens else None
        return [
            Sample(
                data_source=columns[0][row],
                solution_str=self._decode(responses[row].tolist()),
                ground_truth=columns[1][row],
                extra_info=columns[2][row],
                tokens=[] if prompts is None else [*prompts[row].tolist(), *responses[row].tolist()],
                prompt_str="" if prompts is None else self._decode(prompts[row].tolist()),
            )
            for row in rows
        ]

    def _complete(self, outcome: Outcome) -> Outcome:
        missing = [key for key in self._components if isinstance(outcome, Scored) and key not in outcome.numbers]
        return Failure(kind="no_number", message=f"returned None as {missing[0]!r}") if missing else outcome


def final_rows(keys: Sequence[str]) -> list[int]:
    """[N] for each trajectory, the scored row of its session: the one with the highest index."""
    named = [RowKey.parse(key) for key in keys]
    last: dict[tuple[str, int], int] = {}
    for row, key in enumerate(named):
        known = last.get((key.uid, key.session))
        if known is None or named[known].index < key.index:
            last[key.uid, key.session] = row
    return [last[key.uid, key.session] for key in named]


def outcome_metrics(outcomes: Sequence[Outcome]) -> Measured:
    """Failures by kind, and the mean of each further number the function returned.

    A mean is over the sessions for which the function returned that number.
    """
    kinds = Counter(one.kind for one in outcomes if isinstance(one, Failure))
    metrics = {f"reward/failures/{kind}": float(count) for kind, count in kinds.items()}
    named: dict[str, list[float]] = {}
    for one in outcomes:
        if isinstance(one, Scored):
            for name in one.numbers.keys() - {"score", "acc"}:
                named.setdefault(f"reward/extra/{name}", []).append(one.numbers[name])
    metrics |= {name: float(np.mean(named[name])) for name in sorted(named)}
    return metrics, {name: len(values) for name, values in named.items()}


def source_scores(sources: Sequence[str], scored: Mapping[int, float]) -> Measured:
    """`source/<data source>/score/{mean,max,min}` of the scores of rows.

    >>> metrics, sizes = source_scores(["a", "b", "a"], {0: 1.0, 1: 2.0, 2: 0.0})
    >>> metrics["source/a/score/mean"], sizes["source/a/score/mean"]
    (0.5, 2)
    """
    groups: dict[str, list[float]] = {}
    for row, score in scored.items():
        groups.setdefault(f"source/{sources[row]}/score", []).append(score)
    metrics = {name: value for one in sorted(groups) for name, value in stats(one, groups[one]).items()}
    return metrics, {f"{name}/mean": len(values) for name, values in groups.items()}
