"""From scores to advantages, and the statistics of a batch: numpy only, run beside the data."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rl_protocol import BatchData, KVBatchMeta, RaggedColumn, RowKey
from rl_trainer.algorithms.advantages import ADVANTAGE_ESTIMATORS, AdvantageInputs, FloatArray, kl_penalty
from rl_trainer.config import AlgorithmConfig
from rl_trainer.metrics import length_stats, stats


def token_level_rewards(responses: RaggedColumn, scores: FloatArray) -> FloatArray:
    """[T]: the score of a trajectory on its last token, 0 elsewhere; a trajectory without tokens gets none."""
    rewards = np.zeros(responses.values.shape[0])
    filled = responses.lengths > 0
    rewards[responses.offsets[1:][filled] - 1] = scores[filled]
    return rewards


def row_sums(flat: FloatArray, offsets: npt.NDArray[np.int64]) -> FloatArray:
    """Sum of every row of a flat token array, [N]."""
    running = np.concatenate([[0.0], np.cumsum(flat)])
    return running[offsets[1:]] - running[offsets[:-1]]


def estimate_advantages(
    batch: KVBatchMeta, data: BatchData, config: AlgorithmConfig, response_length: int
) -> tuple[BatchData, dict[str, float]]:
    """Advantages and returns of a batch, as columns, and its metrics.

    Args:
        batch: names of the N trajectories.
        data: the columns the `adv` stage reads.
        config: estimator, discount and KL settings.
        response_length: most tokens a response may have, for response_length/clip_ratio.
    """
    responses = data.ragged("responses")
    mask = data.ragged("response_mask").values.astype(np.bool_)
    scores = data.dense("scores").values.astype(np.float64)
    rewards = token_level_rewards(responses, scores)
    metrics: dict[str, float] = {}
    if "ref_log_prob" in data:
        kl = kl_penalty(_flat(data, "old_log_probs"), _flat(data, "ref_log_prob"), config.kl_penalty)
        if mask.any():
            metrics["actor/reward_kl_penalty" if config.use_kl_in_reward else "actor/ref_kl"] = float(kl[mask].mean())
        if config.use_kl_in_reward:
            rewards = np.where(mask, rewards - config.kl_coef * kl, rewards)
    advantages, returns = ADVANTAGE_ESTIMATORS[config.adv_estimator](
        AdvantageInputs(
            keys=[RowKey.parse(key) for key in batch.keys],
            offsets=responses.offsets,
            mask=mask,
            token_level_rewards=rewards,
            scores=row_sums(rewards, responses.offsets),
            values=_flat(data, "values") if "values" in data else None,
            gamma=config.gamma,
            lam=config.lam,
            norm_by_std=config.norm_adv_by_std_in_grpo,
        )
    )
    columns = {
        "advantages": RaggedColumn(advantages.astype(np.float32), responses.offsets, "float32"),
        "returns": RaggedColumn(returns.astype(np.float32), responses.offsets, "float32"),
    }
    metrics |= batch_metrics(data, rewards, advantages, returns, response_length)
    return BatchData(columns), metrics


def batch_metrics(
    data: BatchData, rewards: FloatArray, advantages: FloatArray, returns: FloatArray, response_length: int
) -> dict[str, float]:
    """verl's batch metrics, over unmasked tokens only."""
    responses = data.ragged("responses")
    mask = data.ragged("response_mask").values.astype(np.bool_)
    prompt_lengths = data.ragged("prompts").lengths
    metrics = {
        **stats("critic/score", data.dense("scores").values),
        **stats("critic/acc", data.dense("acc").values),
        **stats("critic/rewards", row_sums(rewards, responses.offsets)),
        **stats("critic/advantages", advantages, mask),
        **stats("critic/returns", returns, mask),
        **stats("prompt_length", prompt_lengths),
        **length_stats("response_length", responses.lengths, response_length),
        "perf/total_num_tokens": float(prompt_lengths.sum() + responses.lengths.sum()),
    }
    if "values" in data:
        metrics |= stats("critic/values", _flat(data, "values"), mask)
    if mask.any():
        metrics["actor/entropy"] = float(_flat(data, "entropy")[mask].mean())
        rollout, old = _flat(data, "rollout_log_probs")[mask], _flat(data, "old_log_probs")[mask]
        difference = np.abs(np.exp(rollout) - np.exp(old))
        metrics["training/rollout_probs_diff_mean"] = float(difference.mean())
        metrics["training/rollout_probs_diff_max"] = float(difference.max())
        metrics["training/rollout_log_probs_diff_max"] = float(np.abs(rollout - old).max())
    return metrics


def _flat(data: BatchData, name: str) -> FloatArray:
    return data.ragged(name).values.astype(np.float64)
