"""Decides how far sampling runs ahead of training, and how many prompts are generated at once.

Pure decisions. Step s trains the groups that were admitted for it, so groups are trained in the
order in which they were admitted. A group is admitted while step s - depth trains or later, and
every step makes at most one version of the weights. Between the version that starts a group and the
version that it trains are therefore at most `depth` versions, whatever the timing.

A deterministic run also fixes the version that starts a group: a weight update waits until all
admitted steps are sampled, so the groups of step s start with the weights that step s - depth
trains. Each prompt is then generated alone, which makes its log-probs independent of the others.
"""

from __future__ import annotations

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
        max_inflight: prompts that are generated at once, each alone; 0: those of one step.
        deterministic: whether a weight update waits until all admitted steps are sampled, and these
            are sampled one after the other.
        on_update: see AsyncConfig. A response that new weights continue or start again has no older
            token than the version at its start, which the depth bounds.
    """

    batch_size: int
    max_staleness: int = 0
    depth: int = 0
    max_inflight: int = 0
    deterministic: bool = False
    on_update: str = "finish"

    @classmethod
    def of(
        cls, config: AsyncConfig, batch_size: int, *, deterministic: bool = False, replicas: int = 1
    ) -> StalenessPolicy:
        """The policy that the options ask for; `replicas` is the number of rollout workers."""
        return cls(
            batch_size=batch_size,
            max_staleness=config.max_staleness,
            depth=config.steps_ahead,
            max_inflight=config.max_inflight_prompts or (replicas if deterministic else 0),
            deterministic=deterministic,
            on_update=config.on_update,
        )

    @property
    def capacity(self) -> int:
        """Prompts whose groups the replay buffer must be able to hold."""
        return (1 + self.depth) * self.batch_size

    def last_admitted(self, training: int) -> int:
        """The last step that may be sampled while step `training` waits for its batch or trains."""
        return training + self.depth

    def prompts_per_call(self, waiting: int) -> int:
        """How many of the waiting prompts of a step one permit is for."""
        return 1 if self.max_inflight else waiting

    @property
    def permits(self) -> int:
        """How many permits to generate there are."""
        return self.max_inflight or 1

    @property
    def drains(self) -> bool:
        """Whether a weight update waits for the running generation."""
        return self.on_update == "finish"

    def too_old(self, age: int) -> bool:
        """Whether a token may not be trained `age` versions after the one that generated it."""
        return age > self.max_staleness
