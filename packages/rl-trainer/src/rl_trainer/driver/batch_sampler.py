"""Samples the batch of a turn: rolls prompts out, scores the responses and filters them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias, TypeVar

from rl_protocol import KVBatchMeta, RLError, RowKey
from rl_protocol.ports import SamplingParams
from rl_protocol.rl_columns import ROUTED, TRAIN_PARTITION
from rl_trainer.algorithms.dapo import Generate, GiveUp, Train, next_round
from rl_trainer.algorithms.old_log_prob import LogProbGap
from rl_trainer.algorithms.staleness_policy import StalenessPolicy
from rl_trainer.asyncio_tasks import both
from rl_trainer.data.prompt_draws import PromptDraws, prompt_uid
from rl_trainer.driver.batch_queue import BatchQueue, Staleness
from rl_trainer.driver.hooks import notify
from rl_trainer.driver.old_log_prob import STAGE, AutoOldLogProb
from rl_trainer.driver.rollout_router import imbalance
from rl_trainer.driver.rollouts import RolledOut, Rollouts, Spare, join_rows
from rl_trainer.driver.stage_calls import call
from rl_trainer.driver.stage_runner import Clock
from rl_trainer.driver.trainer_parts import TrainerParts
from rl_trainer.rollout.trajectory_stats import rollout_metrics
from rl_trainer.workers.messages import FilterResult, Partition, PromptRef, RewardResult, StageCall, StageResult

Scoring = TypeVar("Scoring", bound=RewardResult)
MeasuredPart: TypeAlias = tuple[Mapping[str, float], Mapping[str, int], int]
"""Metrics of a part of a batch, how many numbers a mean among them is of, by name, and rows, which
is that number of the others."""
_FAILURES = "reward/failures"
_IMBALANCE = "rollout/imbalance"
_COUNTS = ("replay/", _FAILURES, "training/filter_groups/")
"""How the names of metrics begin that count something."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """The batch of a turn.

    Attributes:
        rows: scored trajectories to train on, with tags; none if no prompt is informative.
        prompts: all prompts that were rolled out.
        groups: how many prompts have responses in the data plane.
        metrics: of the turn.
        sizes: how many numbers a mean in `metrics` is of, by name; of others, and of all if it was
            sampled before a restart, as many as rows.
        scores: mean and variance of the scores of each prompt, by uid, also of filtered ones.
        stopped: whether it was given up while its prompts were generated; there are no rows.
        unused: keys of the trajectories that were filtered out.
        gap: of a sample of the trajectories, compared while they were scored; None: not compared.
        tokens: [R] response tokens that each replica generated; empty: it was sampled before a
            restart.
    """

    rows: KVBatchMeta
    prompts: Sequence[PromptRef]
    groups: int
    metrics: dict[str, float]
    scores: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    stopped: bool = False
    unused: Sequence[str] = ()
    gap: LogProbGap | None = None
    tokens: Sequence[int] = ()
    sizes: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def oldest(self) -> int | None:
        """Version of the oldest token; None: there is no row."""
        return min(int(version or 0) for version in set(self.rows.tag_values("version"))) if self.rows else None

    @property
    def row_scores(self) -> dict[int, tuple[float, float]]:
        """Mean and variance of the scores of each prompt, by row of the data set."""
        return {prompt.row: self.scores[prompt.uid] for prompt in self.prompts if prompt.uid in self.scores}

    @classmethod
    def joined(cls, parts: Sequence[Sampled]) -> Sampled:
        """The batch of a step, of those of its turns."""
        if len(parts) == 1:
            return parts[0]
        rows = join_rows([part.rows for part in parts if part.rows] or [parts[0].rows])
        measured = [(part.metrics, part.sizes, len(part.rows) + len(part.unused)) for part in parts]
        metrics, sizes = joined_metrics(measured)
        tokens = _by_replica([part.tokens for part in parts])
        metrics.pop(_IMBALANCE, None)  # a mean of those of one turn each
        metrics |= rollout_metrics(rows) | ({_IMBALANCE: imbalance(tokens)} if tokens else {})
        return cls(
            rows=rows,
            prompts=[prompt for part in parts for prompt in part.prompts],
            groups=sum(part.groups for part in parts),
            metrics=metrics,
            sizes=sizes,
            scores={uid: score for part in parts for uid, score in part.scores.items()},
            unused=[key for part in parts for key in part.unused],
            tokens=tokens,
        )


class Sampler:
    """Rolls out and scores prompts with the weights that the rollout replicas have.

    Args:
        parts: of the run.
        policy: how far sampling runs ahead, and what a turn is.
        old_log_prob: compares log-probs of the trajectories.

    Attributes:
        rollouts: the rollout workers.
        draws: the prompts that each step has drawn.
        finished: prompts that were rolled out for training, also those that were dropped meanwhile.
        dropped: those of them that were not and will not be trained on; the trainer counts, too.
        admitted: prompts that turns have drawn.
        refilled: those of them that were drawn in the place of others.
        overtaken: prompts with a response during which the weights changed.
    """

    def __init__(self, parts: TrainerParts, policy: StalenessPolicy, old_log_prob: AutoOldLogProb) -> None:
        self._parts = parts
        self._old_log_prob = old_log_prob
        self.rollouts = Rollouts(
            parts.plane,
            parts.workers.rollout,
            parts.buffers,
            policy=policy,
            replay=parts.replay,
            router=parts.rollout.router,
            timeout_s=parts.loop.stage_timeout_s,
        )
        self._policy = policy
        self.draws = PromptDraws(parts.train_order)
        self.finished = self.dropped = self.admitted = self.refilled = self.overtaken = 0
        self._oldest = 0
        """The oldest version that may still be trained."""
        self._uids: dict[int, int] = {}
        """Prompts of each turn that were dropped for their age, until it is trained: no other one
        gets their uids, so what is late of them is refused."""
        self._repeated: dict[int, int] = {}
        """Row in the data set of the prompt to generate again, by turn."""

    async def sample(self, turn: int) -> Sampled:
        """Roll prompts out and score them, until there are enough informative ones that can be
        trained in time.
        """
        while True:
            sampled = await self._sample(turn)
            oldest = sampled.oldest
            if not sampled.stopped and (oldest is None or oldest >= self._oldest):
                await self.rollouts.discard_unused(TRAIN_PARTITION, turn)
                return sampled
            await self._drop(turn, sampled)

    def select(self, step: int, ready: Mapping[int, Sampled], sampling: Set[int], version: int) -> Sequence[int] | None:
        """The turns that a step trains, of those that are sampled; None: it waits for others."""
        return self._policy.select(step, _oldest(ready, version), self._started(sampling), version)

    async def drop_too_late(self, batches: BatchQueue[Sampled], version: int) -> None:
        """Drop the turns that can't be trained in time if the next step trains `version`; their
        prompts are generated again.

        Turns that are being sampled are cancelled, and from now on `sample` returns none that is
        older than the bound.
        """
        ready, running = _oldest(batches.waiting(), version), self._started(batches.sampling)
        late = self._policy.too_late({**running, **ready}, version)
        self._oldest = version - self._policy.max_staleness
        for turn in running.keys() & late:
            await self.rollouts.stop(TRAIN_PARTITION, turn)
        dropped = batches.withdraw([turn for turn in late if turn in ready])
        for turn, sampled in dropped.items():
            await self._drop(turn, sampled)
        await batches.repeat(dropped)

    def _started(self, sampling: Set[int]) -> dict[int, int]:
        """The version that started the newest prompts of each of these turns that has started."""
        return {turn: first for turn, first in self.rollouts.started(TRAIN_PARTITION).items() if turn in sampling}

    async def _drop(self, turn: int, sampled: Sampled) -> None:
        """Drop what was sampled; when the turn is sampled again, it has the newest of its prompts,
        with another uid.
        """
        self.finished += sampled.stopped  # the others are counted
        self.dropped += sampled.groups + sampled.stopped
        self._uids[turn] = self._uids.get(turn, 0) + len(sampled.prompts)
        self._repeated[turn] = sampled.prompts[-1].row
        await self.rollouts.drop(TRAIN_PARTITION, turn)

    def trained(self, turn: int) -> None:
        """Forget the prompts of a turn that was trained."""
        self.draws.trained(turn)
        self._uids.pop(turn, None)

    def rewind(self) -> None:
        """Draw the prompts of all turns that are not trained again."""
        self.draws.rewind()
        self._repeated.clear()

    async def _sample(self, turn: int) -> Sampled:
        clock, parts, wanted = Clock(), self._parts, self._policy.prompts_per_turn
        step = self._policy.step_of(turn)
        partition = Partition(
            name=TRAIN_PARTITION, split="train", step=step, n=parts.rollout.n, sampling=self.sampling()
        )
        metrics, prompts, kept = dict[str, float](), list[PromptRef](), list[str]()
        decision: Generate | Train | GiveUp = Generate(num_prompts=wanted)
        rows = KVBatchMeta(partition=TRAIN_PARTITION, keys=())
        rounds, generated, groups, failed, truncated = 0, 0, 0, set[str](), 0
        tokens, sizes = list[int](), dict[str, int]()
        scores, scorings = dict[str, tuple[float, float]](), list[MeasuredPart]()

        def draw(count: int) -> Sequence[PromptRef]:
            fresh = self._next_prompts(turn, len(prompts), count)
            self.admitted += count
            self.refilled += count if prompts or turn in self._uids else 0
            prompts.extend(fresh)
            return fresh

        while isinstance(decision, Generate):
            fresh = draw(decision.num_prompts)
            rounds, generated = rounds + 1, generated + len(fresh)
            self._notify("on_sample_begin", step, len(fresh))
            rolled = await clock.time("gen", self.roll_out(partition, fresh, draw, turn=turn))
            add_failures(metrics, rolled)
            groups += rolled.groups
            self.finished += rolled.groups
            self.overtaken += rolled.overtaken
            if not rolled.rows:
                return Sampled(rolled.rows, prompts, groups, metrics, stopped=True)
            new, truncated = rolled.rows, truncated + rolled.truncated
            self._notify("on_sample_end", step, new)
            tokens = _by_replica([tokens, rolled.tokens])
            rows = join_rows([rows, new]) if rows else new
            metrics |= rollout_metrics(rows) | {
                _IMBALANCE: imbalance(tokens),
                "response_length/truncated_ratio": truncated / len(rows),
            }
            scored, gap = await both(
                clock.time("reward", self.score("reward", RewardResult, step, new.without_tags())),
                self._compare(clock, step, new),
            )
            failed |= set(scored.failed)
            scores |= scored.prompt_scores
            scorings.append((scored.metrics, scored.sizes, len(new)))
            rewards, sizes = joined_metrics(scorings)
            metrics |= rewards | {_FAILURES: float(_sessions(failed))}
            if "filter" not in parts.graph:
                metrics |= clock.seconds
                kept_rows = _without(rows, failed)
                return Sampled(kept_rows, prompts, groups, metrics, scores, gap=gap, tokens=tokens, sizes=sizes)
            if usable := _without(new, failed):
                kept += await clock.time("filter", self._informative(step, usable.without_tags()))
            decision = next_round(
                kept,
                wanted=wanted,
                generated=generated,
                rounds=rounds,
                max_rounds=parts.filter_groups.max_num_gen_batches,
            )
        metrics |= clock.seconds | {
            "training/filter_groups/rounds": float(rounds),
            "training/filter_groups/prompts_generated": float(generated),
            "training/filter_groups/prompts_kept": float(len(decision.uids)),
        }
        chosen = set(decision.uids)
        keep = [i for i, key in enumerate(rows.keys) if RowKey.parse(key).uid in chosen]
        used = rows.select_rows(keep)
        unused = sorted(set(rows.keys) - set(used.keys))
        kept_rows = _without(used, failed)
        return Sampled(kept_rows, prompts, groups, metrics, scores, unused=unused, tokens=tokens, sizes=sizes)

    async def _compare(self, clock: Clock, step: int, rows: KVBatchMeta) -> LogProbGap | None:
        """Compare log-probs of rows while they are scored, where the actors have no other work and
        the step trains all rows.
        """
        parts = self._parts
        if self._policy.max_staleness or STAGE not in parts.graph or "filter" in parts.graph:
            return None
        lag = max(Staleness.of(rows, self.rollouts.version).oldest)
        return await self._old_log_prob.compare(clock, step, rows, parts.workers, lag, beside=1)

    async def roll_out(
        self, partition: Partition, prompts: Sequence[PromptRef], spare: Spare | None = None, *, turn: int | None = None
    ) -> RolledOut:
        """Roll prompts out; notify hooks of failures.

        While some are generated, those of calls that have ended are scored.
        """
        rolled = await self.rollouts.roll_out(
            partition, prompts, spare, turn=turn, generated=partial(self._score_ahead, partition.step)
        )
        if rolled.failures:
            self._notify("on_rollout_failure", partition.step, rolled.failures, rolled.replaced)
        return rolled

    def adopt(self, turn: int, uids: Sequence[str]) -> None:
        """Count groups of a turn that were sampled before a restart, and are taken again."""
        self.rollouts.adopt(TRAIN_PARTITION, turn, uids)
        self.finished += len(uids)

    async def _score_ahead(self, step: int, batch: KVBatchMeta) -> None:
        """Begin to score trajectories. `score` raises what is wrong, if they are still needed."""
        message, timeout_s = StageCall(step=step, batch=batch), self._parts.loop.stage_timeout_s
        with suppress(RLError):
            await call(self._parts.workers.reward, "score_ahead", message, StageResult, timeout_s)

    async def score(self, name: str, answer: type[Scoring], step: int, batch: KVBatchMeta) -> Scoring:
        """Score responses, for training (`reward`) or validation (`evaluate`); notify hooks of
        failures.
        """
        message, timeout_s = StageCall(step=step, batch=batch), self._parts.loop.stage_timeout_s
        result = await call(self._parts.workers.reward, name, message, answer, timeout_s)
        if result.failed:
            self._notify("on_reward_failure", step, len(result.failed), len(batch), result.failure)
        return result

    def sampling(self, *, trains: bool = True) -> SamplingParams:
        """The sampling parameters of responses, which are trained on if `trains`."""
        routed = trains and ROUTED in self._parts.graph["rollout"].writes
        return self._parts.rollout.sampling(self._parts.loop.seed, routed_experts=routed)

    def _next_prompts(self, turn: int, known: int, count: int) -> list[PromptRef]:
        again = [self._repeated.pop(turn)] if turn in self._repeated else []
        rows = [*again, *self.draws.draw(turn, count - len(again))]
        first = self._uids.get(turn, 0) + known
        sessions = self._parts.sessions
        return [
            PromptRef(prompt_uid(turn, first + i), row, None if sessions is None else sessions(row))
            for i, row in enumerate(rows)
        ]

    async def _informative(self, step: int, batch: KVBatchMeta) -> tuple[str, ...]:
        """Uids of the prompts that are worth training on."""
        message, timeout_s = StageCall(step=step, batch=batch), self._parts.loop.stage_timeout_s
        return (await call(self._parts.workers.reward, "filter", message, FilterResult, timeout_s)).uids

    def _notify(self, event: str, *facts: object) -> None:
        notify(self._parts.hooks, event, *facts)


def _oldest(sampled: Mapping[int, Sampled], newest: int) -> dict[int, int]:
    """Version of the oldest token of each turn; the newest of all where it has no row."""
    return {turn: newest if one.oldest is None else one.oldest for turn, one in sampled.items()}


def joined_metrics(parts: Sequence[MeasuredPart]) -> tuple[dict[str, float], dict[str, int]]:
    """The metrics of a batch, of those of its parts: sums of counts, the largest maximum and time,
    the least minimum, and of the rest means over the numbers that each is of; and the sizes that
    the parts have.

    >>> one, other = {"a/mean": 1.0, "a/max": 2.0}, {"a/mean": 0.0, "a/max": 3.0}
    >>> joined_metrics([(one, {}, 3), (other, {}, 1)])
    ({'a/mean': 0.75, 'a/max': 3.0}, {})
    >>> joined_metrics([(one, {"a/mean": 1}, 3), (other, {"a/mean": 4}, 4)])
    ({'a/mean': 0.2, 'a/max': 3.0}, {'a/mean': 5})
    """
    values: dict[str, list[tuple[float, int]]] = {}
    total = Counter[str]()
    for metrics, sizes, rows in parts:
        total.update(sizes)
        for name, value in metrics.items():
            values.setdefault(name, []).append((value, sizes.get(name, max(rows, 1))))
    return {name: _joined(name, one) for name, one in values.items()}, dict(total)


def _joined(name: str, weighted: Sequence[tuple[float, int]]) -> float:
    values = [value for value, _ in weighted]
    if name.startswith(_COUNTS):
        return sum(values)
    if name.endswith("/max") or name.startswith("timing_s/"):
        return max(values)
    if name.endswith("/min"):
        return min(values)
    return sum(value * count for value, count in weighted) / sum(count for _, count in weighted)


def _by_replica(parts: Sequence[Sequence[int]]) -> list[int]:
    """[R] the sums over the parts, of which some may be empty."""
    return [sum(counts) for counts in zip(*filter(None, parts), strict=True)]


def add_failures(metrics: dict[str, float], rolled: RolledOut) -> None:
    """Add the failures of a rollout to those of earlier ones in `metrics`."""
    outcomes = [failure.outcome for failure in rolled.failures]
    counts = {
        "replay/failed_sessions": sum(failure.sessions for failure in rolled.failures),
        "replay/retried_prompts": outcomes.count("retried"),
        "replay/partial_prompts": outcomes.count("partial"),
        "replay/replaced_prompts": rolled.replaced,
    }
    for name, count in counts.items():
        metrics[name] = metrics.get(name, 0.0) + count


def _sessions(keys: Iterable[str]) -> int:
    """Number of sessions of these trajectories."""
    return len({(key.uid, key.session) for key in map(RowKey.parse, keys)})


def _without(batch: KVBatchMeta, failed: set[str]) -> KVBatchMeta:
    """The trajectories that have scores."""
    return batch.select_keys([key for key in batch.keys if key not in failed]) if failed else batch
