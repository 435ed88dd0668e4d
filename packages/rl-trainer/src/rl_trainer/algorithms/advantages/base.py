"""What an estimator is given and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np

from rl_protocol import ConfigError, RowKey
from rl_trainer.algorithms.episodes import BoolArray, Episodes, FloatArray, IntArray, episodes

Estimate: TypeAlias = tuple[FloatArray, FloatArray]
"""(advantages [T], returns [T]), both 0 where masked."""


@dataclass(frozen=True, kw_only=True)
class AdvantageInputs:
    """What an estimator may look at. N trajectories, T tokens; see `episodes` for how sessions of several trajectories are seen.

    Attributes:
        keys: [N] names of the trajectories; those of one uid form a group, those of one (uid, session) a session.
        offsets: int64 [N + 1].
        mask: bool [T], true where the policy made the token and it is to be trained on.
        scores: [N] outcome reward; of a session only its last trajectory's is looked at.
        token_rewards: [T] reward received after each token besides the outcome, such as minus the KL penalty; None: none.
        values: [T] V(s_t) of the critic.
        old_log_probs: [T] log-prob of each token before the update, nats.
        sum_pi_squared: [T] sum over the vocabulary of squared probabilities where the token was drawn.
        rollout_is_weights: [T] importance weights of the rollout correction.
        reward_baselines: [N] score of the greedy response to the same prompt.
        reward_components: [N, K] parts of the reward.
        component_weights: [K].
        gamma, lam: discount per token and lambda of GAE.
        norm_by_std: divide group advantages by the group's standard deviation.
    """

    keys: Sequence[RowKey]
    offsets: IntArray
    mask: BoolArray
    scores: FloatArray
    token_rewards: FloatArray | None = None
    values: FloatArray | None = None
    old_log_probs: FloatArray | None = None
    sum_pi_squared: FloatArray | None = None
    rollout_is_weights: FloatArray | None = None
    reward_baselines: FloatArray | None = None
    reward_components: FloatArray | None = None
    component_weights: FloatArray | None = None
    gamma: float = 1.0
    lam: float = 1.0
    norm_by_std: bool = True

    @cached_property
    def episodes(self) -> Episodes:
        """The sessions, in canonical order."""
        return episodes(self.keys, self.offsets, self.mask)

    def need(self, name: str, remedy: str) -> FloatArray:
        """An optional input that the estimator can't do without.

        Raises:
            ConfigError: it is None; `remedy` completes the message.
        """
        value: FloatArray | None = getattr(self, name)
        if value is None:
            raise ConfigError(f"This advantage estimator needs {name}; got none. {remedy}")
        return value

    def stream(self, flat: FloatArray) -> FloatArray:
        """[M] the values of [T] on the tokens the policy made, in canonical order."""
        return flat[self.episodes.tokens]

    def rewards(self) -> FloatArray:
        """[M] reward after each token: the token rewards, and on an episode's last token its score."""
        e = self.episodes
        stream = np.zeros(e.tokens.size) if self.token_rewards is None else self.stream(self.token_rewards).copy()
        stream[e.offsets[1:][e.counts] - 1] += self.scores[e.final_row][e.counts]
        return stream

    def session_scores(self) -> FloatArray:
        """[S] undiscounted sum of an episode's rewards; 0 for one without tokens."""
        return self.episodes.sums(self.rewards())

    def to_tokens(self, stream: FloatArray) -> FloatArray:
        """[T] from [M]."""
        return self.episodes.scatter(stream, self.mask.size)


@dataclass(frozen=True, slots=True)
class Estimator:
    """An estimator and what it asks of a run.

    Attributes:
        estimate: the function.
        reads: columns it needs beyond scores and masks; the step gets the stages that write them.
        compares: it compares the sessions of a prompt, so rollout.n must be at least 2.
    """

    estimate: Callable[[AdvantageInputs], Estimate]
    reads: tuple[str, ...] = ()
    compares: bool = False


def whiten(x: FloatArray) -> FloatArray:
    """Shift and scale to mean 0 and (unbiased) variance 1; 1e-8 is added to the variance. One element, or equal ones, give 0."""
    if x.size < 2 or float(x.min()) == float(x.max()):
        return np.zeros_like(x)
    return (x - x.mean()) / np.sqrt(x.var(ddof=1) + 1e-8)
