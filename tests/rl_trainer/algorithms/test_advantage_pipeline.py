"""The adv stage: KL in the reward, rejection, importance weights, token selection, metrics."""

from __future__ import annotations

import numpy as np
import pytest

from rl_protocol import BatchData, ConfigError, KVBatchMeta, RLError, dense, ragged
from rl_trainer import (
    AlgorithmConfig,
)
from rl_trainer.algorithms.advantage_pipeline import AdvantageSettings, _equal_groups, estimate_advantages
from rl_trainer.algorithms.advantages import ADVANTAGE_ESTIMATORS, Estimator
from rl_trainer.algorithms.arrays import row_sums
from rl_trainer.config import PolicyLossConfig, RolloutCorrectionConfig


def test_row_sums():
    assert row_sums(np.array([1.0, 2.0, 3.0]), np.array([0, 2, 2, 3])).tolist() == [3.0, 0.0, 3.0]


def batch_with_reference():
    keys = ("a/0/0", "a/1/0")
    columns = {
        "prompts": ragged([[1], [1]], "int64"),
        "responses": ragged([[1, 2], [3]], "int64"),
        "response_mask": ragged([[True, True], [True]], "bool"),
        "scores": dense(np.array([1.0, 0.0], np.float32)),
        "acc": dense(np.array([1.0, 0.0], np.float32)),
        "rollout_log_probs": ragged([[-1.0, -1.0], [-1.0]], "float32"),
        "old_log_probs": ragged([[-1.0, -1.0], [-1.0]], "float32"),
        "entropy": ragged([[0.5, 0.5], [2.0]], "float32"),
        "ref_log_prob": ragged([[-2.0, -2.0], [-1.0]], "float32"),
    }
    return KVBatchMeta(partition="train", keys=keys), BatchData(columns)


def scoring(kl_coef=0.0, policy_loss=None, **algorithm):
    return AdvantageSettings(
        algorithm=AlgorithmConfig(**algorithm),
        policy_loss=policy_loss or PolicyLossConfig(),
        response_length=8,
        kl_coef=kl_coef,
        rng=np.random.default_rng(0),
    )


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        (None, "NoneType"),
        (np.zeros(3), "ndarray"),
        ((np.float64(0.5), np.float64(0.5)), r"shapes \[\(\), \(\)\]"),
        ((np.zeros(2), np.zeros(3)), r"shapes \[\(2,\), \(3,\)\]"),
    ],
)
def test_an_estimator_that_returns_no_number_for_each_token_is_named(monkeypatch, returned, got):
    """A single number would be added to every token."""
    monkeypatch.setitem(ADVANTAGE_ESTIMATORS._built_in, "mine", Estimator(lambda _: returned))
    meta, data = batch_with_reference()
    with pytest.raises(ConfigError, match=rf"adv_estimator='mine' must return .* each of the 3 tokens; got {got}\."):
        estimate_advantages(meta, data, scoring(adv_estimator="mine"))


def test_an_estimator_that_raises_is_named_with_its_line(monkeypatch):
    monkeypatch.setitem(ADVANTAGE_ESTIMATORS._built_in, "mine", Estimator(lambda _: 1 / 0))
    named = r"adv_estimator='mine' raised ZeroDivisionError: .* \(.*test_advantage_pipeline\.py:\d+\)\.$"
    with pytest.raises(RLError, match=named):
        estimate_advantages(*batch_with_reference(), scoring(adv_estimator="mine"))


def test_the_divergence_is_taken_from_the_reward_where_asked():
    meta, data = batch_with_reference()
    settings = scoring(use_kl_in_reward=True, kl_coef=0.1, norm_adv_by_std_in_grpo=False)
    columns, metrics, *_ = estimate_advantages(meta, data, settings)
    # k1 is 1 on each token of the first response, so its reward is 1 - 0.2 and the group's mean is
    # 0.4
    assert columns.ragged("advantages").values.tolist() == pytest.approx([0.4, 0.4, -0.4])
    assert metrics["critic/rewards/mean"] == pytest.approx(0.4)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(2 / 3)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.1
    assert metrics["actor/entropy"] == pytest.approx(1.0)
    assert metrics["training/rollout_log_probs_diff_max"] == 0.0


def test_the_reward_of_a_session_is_less_the_divergence_of_all_its_trajectories():
    meta, data = batch_with_reference()
    meta = KVBatchMeta(partition=meta.partition, keys=("p/0/0", "p/0/1"))
    settings = scoring(use_kl_in_reward=True, kl_coef=0.1, adv_estimator="reinforce_plus_plus")
    _, metrics, *_ = estimate_advantages(meta, data, settings)
    divergence = 3 * metrics["actor/reward_kl_penalty"]  # 2 / 3 on average over 3 tokens
    assert metrics["critic/rewards/max"] == metrics["critic/rewards/min"]
    assert metrics["critic/rewards/mean"] == pytest.approx(metrics["critic/score/mean"] - 0.1 * divergence)


def test_the_divergence_is_only_reported_where_it_is_part_of_the_loss():
    meta, data = batch_with_reference()
    _, metrics, *_ = estimate_advantages(meta, data, scoring())
    assert metrics["critic/rewards/mean"] == pytest.approx(0.5)
    assert metrics["actor/ref_kl"] == pytest.approx(2 / 3)


def mismatched(*log_ratios):
    """Three sessions of one prompt with one token each.

    `log_ratios` are the trainer's log-probs minus the rollout's.
    """
    meta = KVBatchMeta(partition="train", keys=("a/0/0", "a/1/0", "a/2/0"))
    ones = ragged([[-1.0]] * 3, "float32")
    columns = {
        "prompts": ragged([[1]] * 3, "int64"),
        "responses": ragged([[3]] * 3, "int64"),
        "response_mask": ragged([[True]] * 3, "bool"),
        "scores": dense(np.array([1.0, 0.0, 100.0], np.float32)),
        "acc": dense(np.zeros(3, np.float32)),
        "rollout_log_probs": ones,
        "old_log_probs": ragged([[-1.0 + d] for d in log_ratios], "float32"),
        "entropy": ones,
    }
    return meta, BatchData(columns)


def test_what_is_rejected_has_no_part_in_any_baseline():
    correction = RolloutCorrectionConfig(rollout_rs=("token_k1",), rollout_rs_threshold=("2.0",))
    columns, metrics, *_ = estimate_advantages(
        *mismatched(0.0, 0.1, 3.0), scoring(adv_estimator="dr_grpo", rollout_correction=correction)
    )
    assert columns.ragged("loss_mask").values.tolist() == [True, True, False]
    assert columns.ragged("advantages").values.tolist() == [0.5, -0.5, 0.0]
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 / 3)
    assert metrics["critic/advantages/max"] == 0.5


def test_the_gap_between_rollout_and_trainer_includes_what_is_rejected_for_it():
    correction = RolloutCorrectionConfig(rollout_rs=("token_k1",), rollout_rs_threshold=("2.0",))
    gaps = [
        {name: value for name, value in metrics.items() if name.startswith("training/rollout_")}
        for settings in (scoring(), scoring(rollout_correction=correction))
        for _, metrics, *_ in [estimate_advantages(*mismatched(0.0, 0.25, -3.0), settings)]
    ]
    assert gaps[0] == gaps[1]
    assert gaps[0]["training/rollout_log_probs_diff_max"] == pytest.approx(3.0)
    assert gaps[0]["training/rollout_log_probs_diff_mean"] == pytest.approx(3.25 / 3)


def test_importance_weights_are_written_and_reported():
    correction = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold="2.0")
    columns, metrics, *_ = estimate_advantages(
        *mismatched(0.0, np.log(1.5), 3.0), scoring(rollout_correction=correction)
    )
    assert columns.ragged("rollout_is_weights").values.tolist() == pytest.approx([1.0, 1.5, 2.0])
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(1.5)
    assert metrics["rollout_corr/kl"] == pytest.approx(-(np.log(1.5) + 3) / 3)


def test_a_batch_in_which_everything_is_rejected_gives_zeros_and_no_nan():
    correction = RolloutCorrectionConfig(
        rollout_rs=("token_k2",), rollout_rs_threshold=("1e-9",), rollout_is="sequence"
    )
    columns, metrics, *_ = estimate_advantages(*mismatched(1.0, 1.0, 1.0), scoring(rollout_correction=correction))
    assert columns.ragged("advantages").values.tolist() == [0.0, 0.0, 0.0]
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 1.0
    assert all(np.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize(("loss", "count"), [("kl_cov", 1), ("clip_cov", 1), ("vanilla", None)])
def test_tokens_are_chosen_for_the_losses_that_want_them(loss, count):
    policy_loss = PolicyLossConfig(loss_mode=loss, clip_cov_lb=-10)
    columns, *_ = estimate_advantages(*mismatched(0.0, 0.5, 1.0), scoring(policy_loss=policy_loss))
    assert (columns.ragged("chosen_tokens").values.sum() if "chosen_tokens" in columns else None) == count


def test_prompts_whose_sessions_all_score_alike_are_counted_by_hand():
    """Scores by prompt: a 1, 1; b 0, 1; c has one session and no other to compare it with."""
    assert _equal_groups(["a", "b", "a", "b", "c"], np.array([1.0, 0.0, 1.0, 1.0, 1.0])) == {
        "critic/score/equal_groups": 0.5
    }
    assert _equal_groups(["a", "b"], np.array([1.0, 1.0])) == {}
