"""The `adv` stage: from scores to advantages, and the metrics of the batch. Numpy only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from rl_protocol import BatchData, ConfigError, KVBatchMeta, RaggedColumn, RLError, RowKey
from rl_protocol.errors import user_code
from rl_trainer.algorithms.advantages import ADVANTAGE_ESTIMATORS, AdvantageInputs, Estimator, role_baselines
from rl_trainer.algorithms.arrays import BoolArray, FloatArray, IntArray, row_sums
from rl_trainer.algorithms.covariance_tokens import clip_cov_tokens, kl_cov_tokens
from rl_trainer.algorithms.data_sources import SourceRows
from rl_trainer.algorithms.kl import kl_penalty
from rl_trainer.algorithms.loss_parts import has_weights, part_weights
from rl_trainer.algorithms.losses import POLICY_LOSSES
from rl_trainer.algorithms.metrics import length_stats, stats
from rl_trainer.algorithms.old_log_prob import LogProbGap
from rl_trainer.algorithms.rollout_correction import MaskedRows, importance_weights, offpolicy_metrics, reject
from rl_trainer.config import AlgorithmConfig, PolicyLossConfig, RolloutCorrectionConfig


@dataclass(frozen=True, kw_only=True)
class AdvantageSettings:
    """Settings of the `adv` stage at one step.

    Attributes:
        algorithm: estimator, discount, KL and correction settings.
        policy_loss: decides which tokens are selected, if any.
        response_length: largest number of tokens of a response, for response_length/clip_ratio.
        kl_coef: weight of the KL penalty in the reward at this step.
        rng: source of random token selections.
        role_means: running mean of the scores of each role before this step.
    """

    algorithm: AlgorithmConfig
    policy_loss: PolicyLossConfig
    response_length: int
    kl_coef: float
    rng: np.random.Generator
    role_means: Mapping[str, float] = field(default_factory=dict[str, float])


class Estimates(NamedTuple):
    """Results of the `adv` stage."""

    columns: BatchData
    """What the losses read."""
    metrics: dict[str, float]
    reward_kl: float | None
    """Mean divergence from the reference per token, nats; None: the reward includes none."""
    role_means: Mapping[str, float]
    """Running mean of the scores of each role after this step."""


def estimate_advantages(batch: KVBatchMeta, data: BatchData, settings: AdvantageSettings) -> Estimates:
    """Compute the columns that the losses read, such as advantages, and the metrics of the batch.

    Rejection comes first, so rejected tokens do not affect any advantage.

    Args:
        batch: names of the N trajectories.
        data: the columns that the `adv` stage reads, under the stage's names for them.
        settings: settings of this step.
    """
    config, offsets = settings.algorithm, data.ragged("responses").offsets
    generated, given = _generated(data)
    sources = SourceRows.of(config, data)
    coefs = sources.coefs()
    observed = _observed(data, generated | given) & (coefs.echo > 0)
    mask, weights, metrics = _corrected(data, generated, config.rollout_correction)
    scores = data.dense("scores").values.astype(np.float64)
    penalty, reward_kl, kl_metrics = _kl_penalty(data, mask, settings)
    inputs = _inputs(batch, data, settings, mask=mask, token_rewards=penalty, weights=weights)
    advantages, returns, role_means = _estimate(inputs, sources)
    columns = {
        "advantages": RaggedColumn(advantages.astype(np.float32), offsets, "float32"),
        "returns": RaggedColumn(returns.astype(np.float32), offsets, "float32"),
        "loss_mask": RaggedColumn(mask | given | observed, offsets, "bool"),
    }
    if has_weights(config):
        weighted = part_weights(given, observed, coefs)
        columns |= {name: RaggedColumn(values, offsets, "float32") for name, values in weighted.items()}
    if weights is not None:
        columns["rollout_is_weights"] = RaggedColumn(weights.astype(np.float32), offsets, "float32")
    if config.trains_policy and POLICY_LOSSES.get(settings.policy_loss.loss_mode).chooses:
        columns["chosen_tokens"] = RaggedColumn(
            _chosen_tokens(_with_policy_loss(inputs, coefs.rl), advantages, settings), offsets, "bool"
        )
    own = row_sums(given.astype(np.float64), offsets) == 0
    final, demonstrations = _rows_by_origin(inputs.episodes.final_row, own)
    rewards = scores.copy()
    if penalty is not None:
        rewards[inputs.episodes.final_row] += inputs.episodes.sums(inputs.gather(penalty))
    metrics |= kl_metrics | batch_metrics(data, mask, rewards, advantages, returns, final)
    metrics |= length_stats(data.ragged("responses").lengths[own], settings.response_length)
    metrics |= _gap_metrics(data, generated)
    metrics |= _equal_groups([inputs.keys[row].uid for row in final], scores[final])
    metrics |= stats("demonstration/score", scores[demonstrations])
    metrics |= sources.metrics(final, scores, advantages, mask)
    metrics |= {f"critic/role_mean/{role}": mean for role, mean in role_means.items()}
    return Estimates(BatchData(columns), metrics, reward_kl, role_means)


def _inputs(
    batch: KVBatchMeta,
    data: BatchData,
    settings: AdvantageSettings,
    *,
    mask: BoolArray,
    token_rewards: FloatArray | None,
    weights: FloatArray | None,
) -> AdvantageInputs:
    """What the advantage estimator gets of the batch."""
    config, baselines, components = settings.algorithm, "reward_baselines", "reward_components"
    return AdvantageInputs(
        keys=[RowKey.parse(key) for key in batch.keys],
        offsets=data.ragged("responses").offsets,
        mask=mask,
        scores=data.dense("scores").values.astype(np.float64),
        token_rewards=token_rewards,
        values=_optional(data, "values"),
        old_log_probs=_optional(data, "old_log_probs"),
        ref_log_prob=_optional(data, "ref_log_prob"),
        sum_pi_squared=_optional(data, "sum_pi_squared"),
        rollout_is_weights=weights,
        reward_baselines=data.dense(baselines).values.astype(np.float64) if baselines in data else None,
        reward_components=_flat(data, components).reshape(len(data), -1) if components in data else None,
        component_weights=np.array(config.component_weights),
        responses=data.ragged("responses").values.astype(np.int64),
        generated=data.ragged("response_mask").values.astype(np.bool_),
        roles=_roles(data) if "extra_info" in data else None,
        role_means=settings.role_means,
        role_decay=config.rae_decay,
        gamma=config.gamma,
        lam=config.lam,
        norm_by_std=config.norm_adv_by_std_in_grpo,
        step_coef=config.gigpo_step_coef,
    )


def _roles(data: BatchData) -> Sequence[str]:
    """[N] data source and role of each trajectory, such as poker/dealer; poker without a role."""
    facts = zip(data.objects("data_source").values(), data.objects("extra_info").values(), strict=True)
    return [f"{source}/{extra['role']}" if "role" in extra else source for source, extra in facts]


def _estimate(inputs: AdvantageInputs, sources: SourceRows) -> tuple[FloatArray, FloatArray, Mapping[str, float]]:
    """Advantages and returns [T], 0 without a policy loss; and the means of the roles after them.

    An estimator sees the sessions of other estimators as sessions without tokens, which it ignores.
    """
    advantages, returns, means = np.zeros(inputs.mask.size), np.zeros(inputs.mask.size), inputs.role_means
    for config, tokens in sources.estimates():
        estimator, own = ADVANTAGE_ESTIMATORS.get(config.adv_estimator), inputs
        if tokens is not None:
            own = replace(
                inputs,
                mask=inputs.mask & tokens,
                norm_by_std=config.norm_adv_by_std_in_grpo,
                gamma=config.gamma,
                lam=config.lam,
            )
        made = _checked(config.adv_estimator, _estimated(config.adv_estimator, estimator, own), inputs.mask.size)
        for total, part in zip((advantages, returns), made, strict=True):
            total += part
        if "extra_info" in estimator.reads:
            means = role_baselines(own)[1]
    return advantages, returns, means


def _estimated(name: str, estimator: Estimator, inputs: AdvantageInputs) -> object:
    with user_code(lambda raised: RLError(f"AlgorithmConfig.adv_estimator={name!r} raised {raised}.")):
        return estimator.estimate(inputs)


def _checked(name: str, returned: object, tokens: int) -> Sequence[FloatArray]:
    """What an estimator returned, if these are advantages and returns [T]."""
    parts = cast("Sequence[object]", returned) if isinstance(returned, tuple | list) else ()
    shapes = [np.shape(cast(npt.ArrayLike, one)) for one in parts]
    if shapes != [(tokens,)] * 2:
        got = f"shapes {shapes}" if parts else type(returned).__name__
        raise ConfigError(
            f"AlgorithmConfig.adv_estimator={name!r} must return a tuple of two arrays, advantages and returns, with a number for each of "
            f"the {tokens} tokens; got {got}."
        )
    return cast("Sequence[FloatArray]", parts)


def _with_policy_loss(inputs: AdvantageInputs, rl: npt.NDArray[np.float32] | np.float32) -> AdvantageInputs:
    """The inputs without tokens whose policy loss weighs nothing."""
    return inputs if np.all(rl > 0) else replace(inputs, mask=inputs.mask & (rl > 0))


def _generated(data: BatchData) -> tuple[BoolArray, BoolArray]:
    """The tokens to train on that the policy generated, and those that the data gave, both [T]."""
    mask = data.ragged("response_mask").values.astype(np.bool_)
    given = data.ragged("demonstration").values.astype(np.bool_) if "demonstration" in data else np.zeros_like(mask)
    return mask & ~given, mask & given


def _observed(data: BatchData, trained: BoolArray) -> BoolArray:
    """The other tokens [T] that environments gave; none where these are not trained on."""
    if "observation" not in data:
        return np.zeros_like(trained)
    return ~trained & data.ragged("observation").values.astype(np.bool_)


def _rows_by_origin(final: IntArray, own: BoolArray) -> tuple[IntArray, IntArray]:
    """The rows of `final` that the policy generated, and those that the data gave; `own` [N]."""
    return final[own[final]], final[~own[final]]


def _corrected(
    data: BatchData, mask: BoolArray, config: RolloutCorrectionConfig
) -> tuple[BoolArray, FloatArray | None, dict[str, float]]:
    """Mask after rejection, importance weights, and rollout_corr/* metrics.

    Without log-probs of both policies there is nothing to correct here.
    """
    if "rollout_log_probs" not in data:
        return mask, None, {}
    train, rollout = _flat(data, "old_log_probs"), _flat(data, "rollout_log_probs")
    rows = MaskedRows.of(mask, data.ragged("responses").offsets)
    metrics = offpolicy_metrics(train, rollout, rows)
    kept, rejected = reject(train - rollout, rows, config.rejections())
    weights = None
    if config.rollout_is:
        weights, weight_metrics = importance_weights(
            train - rollout, rows, config.rollout_is, config.is_bounds(), normalize=config.rollout_is_batch_normalize
        )
        metrics |= weight_metrics
    return kept, weights, {f"rollout_corr/{name}": value for name, value in (metrics | rejected).items()}


def _kl_penalty(
    data: BatchData, mask: BoolArray, settings: AdvantageSettings
) -> tuple[FloatArray | None, float | None, dict[str, float]]:
    """Minus the KL penalty [T] and the mean divergence per token, if the reward includes them; and
    the metrics.
    """
    config = settings.algorithm
    if "ref_log_prob" not in data or "old_log_probs" not in data:
        return None, None, {}
    kl = kl_penalty(_flat(data, "old_log_probs"), _flat(data, "ref_log_prob"), config.kl_penalty)
    name = "actor/reward_kl_penalty" if config.use_kl_in_reward else "actor/ref_kl"
    mean = float(kl[mask].mean()) if mask.any() else None
    metrics = {} if mean is None else {name: mean}
    if not config.use_kl_in_reward:
        return None, None, metrics
    metrics["actor/reward_kl_penalty_coeff"] = settings.kl_coef
    return np.where(mask, -settings.kl_coef * kl, 0.0), mean, metrics


def _chosen_tokens(inputs: AdvantageInputs, advantages: FloatArray, settings: AdvantageSettings) -> BoolArray:
    """The tokens that the policy loss treats differently, bool [T]."""
    config = settings.policy_loss
    log_probs = inputs.require("old_log_probs", "The old_log_prob stage writes them.")
    a, log_p = inputs.gather(advantages), inputs.gather(log_probs)
    if POLICY_LOSSES.get(config.loss_mode).chooses == "kl_cov":
        selected = kl_cov_tokens(a, log_p, ratio=config.kl_cov_ratio)
    else:
        selected = clip_cov_tokens(
            a,
            log_p,
            ratio=config.clip_cov_ratio,
            low=config.clip_cov_lb,
            high=config.clip_cov_ub,
            rng=settings.rng,
        )
    chosen = np.zeros(inputs.mask.size, np.bool_)
    chosen[inputs.episodes.tokens[selected]] = True
    return chosen


def batch_metrics(
    data: BatchData,
    mask: BoolArray,
    rewards: FloatArray,
    advantages: FloatArray,
    returns: FloatArray,
    final: IntArray,
) -> dict[str, float]:
    """verl's batch metrics, over unmasked tokens only.

    Scores belong to sessions: `final` [S] are the rows that were scored. `rewards` [N] are scores
    minus the KL penalties of the session.
    """
    prompt_lengths = data.ragged("prompts").lengths
    metrics = {
        **stats("critic/score", data.dense("scores").values[final]),
        **stats("critic/acc", data.dense("acc").values[final]),
        **stats("critic/rewards", rewards[final]),
        **stats("critic/advantages", advantages, mask),
        **stats("critic/returns", returns, mask),
        **stats("prompt_length", prompt_lengths),
        "perf/total_num_tokens": float(prompt_lengths.sum() + data.ragged("responses").lengths.sum()),
    }
    if "values" in data:
        metrics |= stats("critic/values", _flat(data, "values"), mask)
    if mask.any() and "entropy" in data:
        metrics["actor/entropy"] = float(_flat(data, "entropy")[mask].mean())
    return metrics


def _gap_metrics(data: BatchData, generated: BoolArray) -> dict[str, float]:
    """The gap between rollout engine and actor, over all tokens that the policy generated: also
    those that are rejected because of it.
    """
    if "rollout_log_probs" not in data:
        return {}
    rollout, actor = _flat(data, "rollout_log_probs"), _flat(data, "old_log_probs")
    return LogProbGap.of(rollout, actor, generated, data.ragged("responses").offsets).metrics()


def _equal_groups(uids: Sequence[str], scores: FloatArray) -> dict[str, float]:
    """Fraction of prompts whose sessions all have the same score.

    Prompts with one session do not count; {} if there are no others.
    """
    groups: dict[str, list[float]] = {}
    for uid, score in zip(uids, scores.tolist(), strict=True):
        groups.setdefault(uid, []).append(score)
    several = [group for group in groups.values() if len(group) > 1]
    return {"critic/score/equal_groups": sum(len(set(g)) == 1 for g in several) / len(several)} if several else {}


def _flat(data: BatchData, name: str) -> FloatArray:
    return data.ragged(name).values.astype(np.float64)


def _optional(data: BatchData, name: str) -> FloatArray | None:
    return _flat(data, name) if name in data else None
