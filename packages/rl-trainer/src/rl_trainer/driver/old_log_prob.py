"""Decides whether a step takes the rollout engine's log-probs (algorithm.old_log_prob=auto)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rl_protocol import KVBatchMeta
from rl_trainer.algorithms.old_log_prob import FULL_CHECK_PERIOD, GAP, STALENESS, LogProbGap, sampled_rows
from rl_trainer.driver.stage_calls import StepRows, WorkerHandle, Workers, call_ranks, forward_calls, read_ahead
from rl_trainer.driver.stage_runner import Clock, ModelStage

STAGE = "log_prob_gap"
"""Runs on the sample."""


class AutoOldLogProb:
    """Takes the rollout engine's log-probs where they agree with the actor's.

    A step compares them on a seeded sample of its rows, and takes the engine's if their mean
    difference is at most the tolerance. It recomputes those of all rows, without a sample, if it is
    the first step or one of every FULL_CHECK_PERIOD, if any row is from older weights, and if the
    step before it found a larger difference.

    Args:
        tolerance: algorithm.old_log_prob_tolerance, nats.
        seed: of the run, for the samples.
        timeout_s: longest time of one call.

    Attributes:
        agree: whether the last step that compared them found at most the tolerance; a checkpoint
            keeps it, so that a resumed run decides alike.
    """

    def __init__(self, tolerance: float, seed: int, timeout_s: float) -> None:
        self._tolerance = tolerance
        self._seed = seed
        self._timeout_s = timeout_s
        self.agree = True

    def samples(self, step: int, lag: int) -> bool:
        """Whether the step compares a sample and not all rows.

        `lag` is the age of its oldest weights, in versions.
        """
        return self.agree and lag == 0 and (step - 1) % FULL_CHECK_PERIOD > 0

    async def compare(
        self, clock: Clock, step: int, rows: KVBatchMeta, workers: Workers, lag: int, *, beside: int = 0
    ) -> LogProbGap | None:
        """Have the actors compare a sample of the rows; None: the step compares all or none, also
        because there are fewer rows than data-parallel ranks.

        `lag` as in `samples`; `beside` counts other processes that compute meanwhile.

        Raises:
            RLError: a rank failed.
        """
        ranks = workers.actor
        dp_ranks = workers.dp_ranks_of(ranks)
        if not self.samples(step, lag) or len(rows) <= max(dp_ranks):
            return None
        return await clock.time(STAGE, self._gap(step, StepRows.of(rows), ranks, dp_ranks, beside))

    async def _gap(
        self, step: int, rows: StepRows, ranks: Sequence[WorkerHandle], dp_ranks: Sequence[int], beside: int
    ) -> LogProbGap:
        sample = rows.select(sampled_rows(len(rows.names), max(dp_ranks) + 1, self._seed, step))
        calls = forward_calls(STAGE, step, sample, len(ranks), dp_ranks)
        calls = ModelStage(STAGE, ranks, calls).beside(len(ranks) + beside).calls
        if len(ranks) > 1:
            await read_ahead(ranks, STAGE, calls, self._timeout_s)
        answers = await call_ranks(ranks, STAGE, calls, LogProbGap, self._timeout_s)
        by_replica = dict(zip(dp_ranks, answers, strict=True))  # ranks of one replica answer alike
        return sum(by_replica.values(), LogProbGap())

    def note(self, metrics: Mapping[str, float]) -> None:
        """Keep what a step found, unless rows from older weights explain it."""
        if GAP in metrics and not metrics.get(STALENESS):
            self.agree = self.agrees(metrics)

    def agrees(self, metrics: Mapping[str, float]) -> bool:
        """Whether the difference among these metrics is at most the tolerance."""
        return metrics.get(GAP, 0.0) <= self._tolerance
