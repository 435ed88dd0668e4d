"""Decides how far sampling runs ahead of training, what each step trains on, and what is dropped.

Pure decisions. Sampling goes in turns. With order=in_order a turn is the batch of a step, and step
s trains turn s. With order=ready_first a turn is one prompt, and a step trains the first batch_size
turns that are ready. A turn is admitted while step s - depth trains or later, where s is the step
that trains it if all are trained in order, and every step makes at most one version of the weights.

in_order: between the version that starts a group and the version that it trains are therefore at
most `depth` versions, whatever the timing.

ready_first, when_stale=wait: a step takes ready groups only if all others that have started can
still be trained in time, the oldest first. Those that start later follow them: there are at most
(1 + depth) * batch_size untrained turns, so they are in time, too.

ready_first, when_stale=drop: a step takes ready groups whatever becomes of the others. Before the
next version is sent, those are dropped that could not be trained in time even if every step took
the oldest first.

A deterministic run also fixes the version that starts a group: a weight update waits until all
admitted steps are sampled, so the groups of step s start with the weights that step s - depth
trains. Each prompt is then generated alone, which makes its log-probs independent of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rl_trainer.config import AsyncConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class StalenessPolicy:
    """The staleness policy of a run.

    >>> policy = StalenessPolicy(batch_size=8, max_staleness=2, depth=1)
    >>> policy.last_admitted(training=5), policy.capacity
    (6, 16)

    Attributes:
        batch_size: prompts of a step.
        max_staleness: most versions between the weights that generated a token and those it trains.
        depth: steps that sampling runs ahead, at most `max_staleness`.
        max_inflight: prompts that are generated at once, each alone; 0: those of all admitted
            steps.
        deterministic: whether a weight update waits until all admitted steps are sampled, and these
            are sampled one after the other.
        on_update: see AsyncConfig. A response that new weights continue or start again has no older
            token than the version at its start, which the depth bounds.
        order: see AsyncConfig.
        when_stale: see AsyncConfig.
    """

    batch_size: int
    max_staleness: int = 0
    depth: int = 0
    max_inflight: int = 0
    deterministic: bool = False
    on_update: str = "finish"
    order: str = "in_order"
    when_stale: str = "wait"

    @classmethod
    def of(
        cls, config: AsyncConfig, batch_size: int, *, deterministic: bool = False, replicas: int = 1
    ) -> StalenessPolicy:
        """The policy that the options ask for; `replicas` is the number of rollout workers."""
        return cls(
            batch_size=batch_size,
            max_staleness=config.max_staleness,
            depth=config.steps_ahead,
            max_inflight=config.max_inflight_prompts
            or (replicas if deterministic else batch_size if config.order == "ready_first" else 0),
            deterministic=deterministic,
            on_update=config.on_update,
            order=config.order,
            when_stale=config.when_stale,
        )

    @property
    def capacity(self) -> int:
        """Prompts whose groups the replay buffer must be able to hold."""
        return (1 + self.depth) * self.batch_size

    @property
    def turns_per_step(self) -> int:
        """Turns that a step trains."""
        return self.batch_size if self.order == "ready_first" else 1

    @property
    def prompts_per_turn(self) -> int:
        """Prompts that a turn trains on."""
        return self.batch_size // self.turns_per_step

    def step_of(self, turn: int) -> int:
        """The step that trains a turn if all are trained in order."""
        return (turn - 1) // self.turns_per_step + 1

    def last_admitted(self, training: int) -> int:
        """The last turn that may be sampled while step `training` waits for its batch or trains."""
        return (training + self.depth) * self.turns_per_step

    def select(
        self, step: int, ready: Mapping[int, int], running: Mapping[int, int], version: int
    ) -> Sequence[int] | None:
        """The turns that a step trains, in order; None: it must wait.

        >>> policy = StalenessPolicy(batch_size=2, max_staleness=2, depth=1, order="ready_first")
        >>> policy.select(3, ready={6: 2, 7: 2}, running={5: 1, 8: 2}, version=2)
        [6, 7]
        >>> policy.select(4, ready={8: 2, 9: 3}, running={5: 1, 10: 3}, version=3) is None
        True

        Args:
            step: the step.
            ready: version of the oldest token of each turn that is sampled.
            running: version that started each turn that is being sampled.
            version: of the weights that the step trains.
        """
        if self.order == "in_order":
            return [step] if step in ready else None
        chosen = sorted(ready, key=lambda turn: (ready[turn], turn))[: self.batch_size]
        others = {turn: first for turn, first in {**running, **ready}.items() if turn not in chosen}
        if len(chosen) < self.batch_size or (self.when_stale == "wait" and self.too_late(others, version + 1)):
            return None
        return sorted(chosen)

    def too_late(self, turns: Mapping[int, int], version: int) -> list[int]:
        """Those of these turns that can't be trained in time, if the next step trains `version` and
        every step takes the oldest first.

        >>> policy = StalenessPolicy(batch_size=2, max_staleness=2, depth=2, order="ready_first")
        >>> policy.too_late({1: 1, 2: 1, 3: 1, 4: 2, 5: 3}, version=3)
        [3]

        Args:
            turns: version of the oldest token of each.
            version: see above.
        """
        late, kept = list[int](), 0
        for turn in sorted(turns, key=lambda turn: (turns[turn], turn)):
            if self.too_old(version + kept // self.turns_per_step - turns[turn]):
                late.append(turn)
            else:
                kept += 1
        return late

    def all_in_time(self, turns: Mapping[int, int], done: int, version: int) -> bool:
        """Whether all of these turns, which are sampled, can be trained in time.

        >>> policy = StalenessPolicy(batch_size=2, max_staleness=1, depth=1)
        >>> policy.all_in_time({4: 2, 5: 3}, done=3, version=3)
        True
        >>> policy.all_in_time({4: 3, 5: 2}, done=3, version=3)
        False

        Args:
            turns: version of the oldest token of each.
            done: steps that are done.
            version: of the weights that the next step trains.
        """
        if self.order == "in_order":
            return not any(
                self.too_old(version + self.step_of(turn) - done - 1 - oldest) for turn, oldest in turns.items()
            )
        return not self.too_late(turns, version)

    def prompts_per_call(self, waiting: int) -> int:
        """How many of the waiting prompts of a step one permit is for."""
        return 1 if self.max_inflight else waiting

    @property
    def permits(self) -> int:
        """Number of permits to generate: for prompts with `max_inflight`, otherwise for steps."""
        return self.max_inflight or 1 + self.depth

    @property
    def drops(self) -> bool:
        """Whether groups that would be too old are dropped."""
        return self.when_stale == "drop"

    @property
    def drains(self) -> bool:
        """Whether a weight update waits for the running generation."""
        return self.on_update == "finish"

    def too_old(self, age: int) -> bool:
        """Whether a token may not be trained `age` versions after the one that generated it."""
        return age > self.max_staleness
