"""Advantage estimators over ragged data.

N trajectories, T = total response tokens, flat token arrays [T] with offsets [N + 1]. All arithmetic is float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from rl_protocol import ConfigError, RowKey

FloatArray: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class AdvantageInputs:
    """What an estimator may look at.

    Attributes:
        keys: [N] names of the trajectories; trajectories of one uid form a group, those of one (uid, session) a session.
        offsets: int64 [N + 1].
        mask: bool [T], true where the policy made the token.
        token_level_rewards: [T], reward received after each token.
        scores: [N], sum of a trajectory's outcome reward (without any per-token penalty).
        values: [T] V(s_t) of the critic, or None.
        gamma, lam: discount and GAE lambda.
        norm_by_std: divide group advantages by the group's standard deviation.
    """

    keys: Sequence[RowKey]
    offsets: npt.NDArray[np.int64]
    mask: npt.NDArray[np.bool_]
    token_level_rewards: FloatArray
    scores: FloatArray
    values: FloatArray | None = None
    gamma: float = 1.0
    lam: float = 1.0
    norm_by_std: bool = True


Estimate: TypeAlias = tuple[FloatArray, FloatArray]
"""(advantages [T], returns [T]), both 0 where masked."""


def whiten(x: FloatArray, mask: npt.NDArray[np.bool_]) -> FloatArray:
    """Shift and scale the unmasked elements to mean 0 and (unbiased) variance 1; masked ones become 0.

    One element or equal elements give 0.
    """
    chosen = x[mask]
    if chosen.size == 0:
        return np.zeros_like(x)
    variance = float(chosen.var(ddof=1)) if chosen.size > 1 else 0.0
    return np.where(mask, (x - chosen.mean()) / np.sqrt(variance + 1e-8), 0.0)


def gae(inputs: AdvantageInputs) -> Estimate:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438, eq. 11 to 16), then whitened over the batch.

    delta_t = r_t + gamma V(s_{t+1}) - V(s_t);  A_t = delta_t + gamma lam A_{t+1};  R_t = A_t + V(s_t).
    Tokens that the policy did not make (mask false) are stepped over: t + 1 is the next token it made. V after the last is 0.

    Raises:
        ConfigError: no values.
    """
    if inputs.values is None:
        raise ConfigError(
            "algorithm.adv_estimator=gae needs the critic's values; got none. Use algorithm=ppo, which adds a critic."
        )
    lengths = np.diff(inputs.offsets)
    width = int(lengths.max(initial=0))
    inside = np.arange(width)[None, :] < lengths[:, None]

    def grid(flat: npt.NDArray[np.generic]) -> FloatArray:
        out = np.zeros(inside.shape)
        out[inside] = flat
        return out

    rewards, values, mask = grid(inputs.token_level_rewards), grid(inputs.values), grid(inputs.mask)
    advantages = np.zeros_like(rewards)
    next_value, next_advantage = np.zeros(len(lengths)), np.zeros(len(lengths))
    for t in range(width - 1, -1, -1):
        m = mask[:, t]
        delta = rewards[:, t] + inputs.gamma * next_value - values[:, t]
        here = delta + inputs.gamma * inputs.lam * next_advantage
        next_value = m * values[:, t] + (1 - m) * next_value
        next_advantage = m * here + (1 - m) * next_advantage
        advantages[:, t] = m * here
    flat = advantages[inside]
    returns = np.where(inputs.mask, flat + inputs.values, 0.0)
    return whiten(flat, inputs.mask), returns


def grpo(inputs: AdvantageInputs) -> Estimate:
    """Group-relative advantage (Shao et al. 2024, arXiv:2402.03300, section 4.1.2): (score - mean) / std of the prompt's sessions.

    Of a session with several trajectories only the last one's score counts, once, and all its trajectories share the advantage. A session
    whose tokens are all masked (rejected) does not enter its group's mean. std is unbiased; 1e-6 is added to it. A group of one session
    has advantage 0: there is nothing to compare with. `norm_by_std=False` leaves the division out (Dr.GRPO, Liu et al. 2025,
    arXiv:2503.20783). Every unmasked token of a trajectory gets its session's advantage, which is also its return.
    """
    sessions = _sessions(inputs)
    groups: dict[str, list[tuple[str, int]]] = {}
    for session, row in sessions.items():
        if row.counts:
            groups.setdefault(session[0], []).append(session)
    advantage = dict.fromkeys(sessions, 0.0)
    for members in groups.values():
        if len(members) > 1:
            scores = np.array([sessions[m].score for m in members])
            scale = scores.std(ddof=1) + 1e-6 if inputs.norm_by_std else 1.0
            advantage.update(zip(members, ((scores - scores.mean()) / scale).tolist(), strict=True))
    per_row = np.array([advantage[key.uid, key.session] for key in inputs.keys])
    per_token = np.where(inputs.mask, np.repeat(per_row, np.diff(inputs.offsets)), 0.0)
    return per_token, per_token


@dataclass
class _Session:
    last_index: int
    score: float
    counts: bool


def _sessions(inputs: AdvantageInputs) -> dict[tuple[str, int], _Session]:
    out: dict[tuple[str, int], _Session] = {}
    for i, key in enumerate(inputs.keys):
        has_tokens = bool(inputs.mask[inputs.offsets[i] : inputs.offsets[i + 1]].any())
        known = out.get((key.uid, key.session))
        if known is None:
            out[key.uid, key.session] = _Session(key.index, float(inputs.scores[i]), has_tokens)
            continue
        known.counts = known.counts or has_tokens
        if key.index > known.last_index:
            known.last_index, known.score = key.index, float(inputs.scores[i])
    return out


ADVANTAGE_ESTIMATORS: dict[str, Callable[[AdvantageInputs], Estimate]] = {"gae": gae, "grpo": grpo}
"""Name in algorithm.adv_estimator -> function."""


def kl_penalty(log_prob: FloatArray, ref_log_prob: FloatArray, kind: str) -> FloatArray:
    """Per-token estimate of KL(policy || reference) from the sampled token (Schulman 2020, "Approximating KL divergence").

    With d = log_prob - ref_log_prob: k1 = d, abs = |d|, k2 = d^2 / 2, k3 = exp(-d) - 1 + d (unbiased and never negative).
    """
    d = log_prob - ref_log_prob
    if kind == "k1":
        return d
    if kind == "abs":
        return np.abs(d)
    if kind == "k2":
        return 0.5 * d * d
    if kind == "k3":
        return np.exp(-d) - 1 + d
    raise ConfigError(f"Unknown KL estimator {kind!r}; known are k1, k2, k3, abs.")
