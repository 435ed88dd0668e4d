"""Interface of an advantage estimator: its inputs, its result, and the columns that it reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np

from rl_protocol import ConfigError, RowKey
from rl_trainer.algorithms.advantages.episodes import Episodes, episodes
from rl_trainer.algorithms.arrays import BoolArray, FloatArray, IntArray

Estimate: TypeAlias = tuple[FloatArray, FloatArray]
"""(advantages [T], returns [T]), both 0 where masked."""


@dataclass(frozen=True, kw_only=True)
class AdvantageInputs:
    """Inputs of an advantage estimator: N trajectories, T tokens.

    Estimators work on sessions; see `episodes` for sessions of several trajectories.

    Attributes:
        keys: [N] names of the trajectories. Equal uids form a group, equal (uid, session) a
            session.
        offsets: int64 [N + 1].
        mask: bool [T], true for tokens that the policy generated and that are trained on.
        scores: [N] outcome reward; only the last trajectory of a session counts.
        token_rewards: [T] reward of each token besides the outcome, such as minus the KL penalty.
        values: [T] V(s_t) of the critic.
        old_log_probs: [T] log-prob of each token before the update, nats.
        ref_log_prob: [T] the same under the reference policy.
        sum_pi_squared: [T] sum of squared probabilities over the vocabulary, at each token.
        rollout_is_weights: [T] importance weights of the rollout correction.
        reward_baselines: [N] score of the greedy response to the same prompt.
        reward_components: [N, K] components of the reward.
        component_weights: [K].
        responses: int64 [T] token ids, observations included.
        generated: bool [T], true for tokens that the policy generated, also rejected ones.
        roles: [N] data source and role of each trajectory; None: the estimator does not read them.
        role_means: running mean of the scores of each role before this batch.
        role_decay: part of a running mean that stays when a session is added.
        gamma, lam: discount per token (GiGPO: per turn) and lambda of GAE.
        norm_by_std: divide group advantages by the group's standard deviation.
        step_coef: weight of GiGPO's advantage of a turn.
    """

    keys: Sequence[RowKey]
    offsets: IntArray
    mask: BoolArray
    scores: FloatArray
    token_rewards: FloatArray | None = None
    values: FloatArray | None = None
    old_log_probs: FloatArray | None = None
    ref_log_prob: FloatArray | None = None
    sum_pi_squared: FloatArray | None = None
    rollout_is_weights: FloatArray | None = None
    reward_baselines: FloatArray | None = None
    reward_components: FloatArray | None = None
    component_weights: FloatArray | None = None
    responses: IntArray | None = None
    generated: BoolArray | None = None
    roles: Sequence[str] | None = None
    role_means: Mapping[str, float] = field(default_factory=dict[str, float])
    role_decay: float = 0.95
    gamma: float = 1.0
    lam: float = 1.0
    norm_by_std: bool = True
    step_coef: float = 1.0

    @cached_property
    def episodes(self) -> Episodes:
        """The sessions, sorted by (uid, session)."""
        return episodes(self.keys, self.offsets, self.mask)

    def require(self, name: str, remedy: str) -> FloatArray:
        """The optional input `name`, for an estimator that can't work without it.

        Raises:
            ConfigError: it is None; the message ends with `remedy`.
        """
        value: FloatArray | None = getattr(self, name)
        if value is None:
            raise ConfigError(f"This advantage estimator needs {name}; got none. {remedy}")
        return value

    def gather(self, flat: FloatArray) -> FloatArray:
        """[M] the values of [T] at the tokens of the episodes, in their order."""
        return flat[self.episodes.tokens]

    def scatter(self, stream: FloatArray) -> FloatArray:
        """[T] from [M], 0 where masked; the inverse of `gather`."""
        return self.episodes.scatter(stream, self.mask.size)

    def rewards(self) -> FloatArray:
        """[M] reward of each token, plus the score at an episode's last token."""
        e = self.episodes
        stream = np.zeros(e.tokens.size) if self.token_rewards is None else self.gather(self.token_rewards).copy()
        stream[e.offsets[1:][e.nonempty] - 1] += self.scores[e.final_row][e.nonempty]
        return stream

    def session_scores(self) -> FloatArray:
        """[S] undiscounted sum of each episode's rewards; 0 for an episode without tokens."""
        return self.episodes.sums(self.rewards())

    def session_advantages(self, per_session: FloatArray) -> Estimate:
        """An estimate that gives every token its session's value [S], as advantage and return."""
        per_token = self.scatter(self.episodes.per_token(per_session))
        return per_token, per_token


@dataclass(frozen=True, slots=True)
class Estimator:
    """An estimator and what it requires of a run.

    Attributes:
        estimate: the function.
        reads: columns that it reads besides scores and masks; the stages that write them are added
            to the step.
        compares: it compares the sessions of a prompt, so rollout.n must be at least 2.
        settings: which of gamma, lam and norm_adv_by_std_in_grpo it uses; AlgorithmConfig.by_source
            sets only these.
        nonnegative: it takes no rewards below 0, so nothing may be subtracted from them.
    """

    estimate: Callable[[AdvantageInputs], Estimate]
    reads: tuple[str, ...] = ()
    compares: bool = False
    settings: tuple[str, ...] = ()
    nonnegative: bool = False


def whiten(x: FloatArray) -> FloatArray:
    """Shift and scale to mean 0 and unbiased variance 1; 1e-8 is added to the variance.

    A single element, or elements that are all equal, give 0.
    """
    if x.size < 2 or float(x.min()) == float(x.max()):
        return np.zeros_like(x)
    return (x - x.mean()) / np.sqrt(x.var(ddof=1) + 1e-8)
