"""Reductions by hand, and the step graph."""

from __future__ import annotations

import numpy as np
import pytest

from rl_protocol import BatchData, ConfigError, KVBatchMeta, dense, ragged
from rl_trainer import (
    ActorConfig,
    AlgorithmConfig,
    CriticConfig,
    LoopConfig,
    OptimConfig,
    PromptOrder,
    RolloutConfig,
    Stage,
    build_graph,
    check_graph,
)
from rl_trainer.config import PolicyLossConfig, RolloutCorrectionConfig
from rl_trainer.metrics import explained_variance, length_stats, stats
from rl_trainer.scoring import Scoring, _equal_groups, estimate_advantages, row_sums


def test_masked_statistics_by_hand():
    assert stats("x", [1.0, 5.0, 100.0], np.array([True, True, False])) == {"x/mean": 3.0, "x/max": 5.0, "x/min": 1.0}
    assert stats("x", [1.0], np.array([False])) == {}


def test_clip_ratio_is_against_the_configured_maximum():
    assert length_stats("response_length", [2, 4, 4], 8)["response_length/clip_ratio"] == 0.0
    assert length_stats("response_length", [2, 8, 4], 8)["response_length/clip_ratio"] == pytest.approx(1 / 3)


def test_explained_variance():
    assert explained_variance(np.array([1.0, 2.0]), np.array([1.0, 2.0])) == 1.0
    assert explained_variance(np.array([0.0, 0.0]), np.array([1.0, 3.0])) == 0.0
    assert explained_variance(np.array([0.0, 1.0]), np.array([2.0, 2.0])) == 0.0


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
    return Scoring(
        algorithm=AlgorithmConfig(**algorithm),
        policy_loss=policy_loss or PolicyLossConfig(),
        response_length=8,
        kl_coef=kl_coef,
        rng=np.random.default_rng(0),
    )


def test_the_divergence_is_taken_from_the_reward_where_asked():
    meta, data = batch_with_reference()
    settings = scoring(use_kl_in_reward=True, kl_coef=0.1, norm_adv_by_std_in_grpo=False)
    columns, metrics = estimate_advantages(meta, data, settings)
    # k1 is 1 nat on each token of the first response: its reward is 1 - 0.2, so the group's mean is 0.4
    assert columns.ragged("advantages").values.tolist() == pytest.approx([0.4, 0.4, -0.4])
    assert metrics["critic/rewards/mean"] == pytest.approx(0.4)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(2 / 3)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.1
    assert metrics["actor/entropy"] == pytest.approx(1.0)
    assert metrics["training/rollout_log_probs_diff_max"] == 0.0


def test_the_divergence_is_only_reported_where_it_is_part_of_the_loss():
    meta, data = batch_with_reference()
    _, metrics = estimate_advantages(meta, data, scoring())
    assert metrics["critic/rewards/mean"] == pytest.approx(0.5)
    assert metrics["actor/ref_kl"] == pytest.approx(2 / 3)


def mismatched(*log_ratios):
    """Three sessions of one prompt, one token each, whose trainer log-prob is log_ratio above the rollout's."""
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
    correction = RolloutCorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold="2.0")
    columns, metrics = estimate_advantages(
        *mismatched(0.0, 0.1, 3.0), scoring(adv_estimator="dr_grpo", rollout_correction=correction)
    )
    assert columns.ragged("loss_mask").values.tolist() == [True, True, False]
    assert columns.ragged("advantages").values.tolist() == [0.5, -0.5, 0.0]
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 / 3)
    assert metrics["critic/advantages/max"] == 0.5


def test_importance_weights_are_written_and_reported():
    correction = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold="2.0")
    columns, metrics = estimate_advantages(*mismatched(0.0, np.log(1.5), 3.0), scoring(rollout_correction=correction))
    assert columns.ragged("rollout_is_weights").values.tolist() == pytest.approx([1.0, 1.5, 2.0])
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(1.5)
    assert metrics["rollout_corr/kl"] == pytest.approx(-(np.log(1.5) + 3) / 3)


def test_a_batch_in_which_everything_is_rejected_gives_zeros_and_no_nan():
    correction = RolloutCorrectionConfig(rollout_rs="token_k2", rollout_rs_threshold="1e-9", rollout_is="sequence")
    columns, metrics = estimate_advantages(*mismatched(1.0, 1.0, 1.0), scoring(rollout_correction=correction))
    assert columns.ragged("advantages").values.tolist() == [0.0, 0.0, 0.0]
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 1.0
    assert all(np.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize(("loss", "count"), [("kl_cov", 1), ("clip_cov", 1), ("vanilla", None)])
def test_tokens_are_chosen_for_the_losses_that_want_them(loss, count):
    policy_loss = PolicyLossConfig(loss_mode=loss, clip_cov_lb=-10)
    columns, _ = estimate_advantages(*mismatched(0.0, 0.5, 1.0), scoring(policy_loss=policy_loss))
    assert (columns.ragged("chosen_tokens").values.sum() if "chosen_tokens" in columns else None) == count


def test_the_graph_of_grpo_and_ppo():
    plain = build_graph(AlgorithmConfig(), ActorConfig())
    assert [s.name for s in plain.stages] == ["rollout", "reward", "old_log_prob", "adv", "update_actor"]
    full = build_graph(AlgorithmConfig(adv_estimator="gae"), ActorConfig(use_kl_loss=True))
    assert [s.name for s in full.stages] == [
        "rollout", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor",
    ]  # fmt: skip
    assert "values" in full["adv"].reads
    assert "ref_log_prob" in full["update_actor"].reads
    assert "data_source" not in full["update_actor"].reads


def test_bypass_mode_leaves_the_old_log_prob_stage_out():
    graph = build_graph(AlgorithmConfig(rollout_correction=RolloutCorrectionConfig(bypass_mode=True)), ActorConfig())
    assert "old_log_prob" not in graph
    for name in ("adv", "update_actor"):
        assert "old_log_probs" not in graph[name].reads
        renamed = graph[name].rename(BatchData({"rollout_log_probs": ragged([[-1.0]], "float32")}))
        assert renamed.field_names == ("old_log_probs",)


def test_rejection_reaches_actor_and_critic_under_the_name_they_know():
    correction = RolloutCorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold="2", rollout_is="token")
    graph = build_graph(AlgorithmConfig(adv_estimator="gae", rollout_correction=correction), ActorConfig())
    assert graph["adv"].writes == ("advantages", "returns", "loss_mask", "rollout_is_weights")
    assert "response_mask" in graph["adv"].reads
    for name in ("update_critic", "update_actor"):
        assert "response_mask" not in graph[name].reads
        assert graph[name].rename(BatchData({"loss_mask": ragged([[True]], "bool")})).field_names == ("response_mask",)
    assert "rollout_is_weights" in graph["update_actor"].reads


def test_columns_that_only_some_algorithms_need_travel_only_for_them():
    graph = build_graph(AlgorithmConfig(adv_estimator="optimal_token_baseline"), ActorConfig())
    assert "sum_pi_squared" in graph["old_log_prob"].writes
    graph = build_graph(AlgorithmConfig(adv_estimator="gdpo", gdpo_reward_keys="score,acc"), ActorConfig())
    assert graph["reward"].writes == ("scores", "acc", "reward_components")
    graph = build_graph(AlgorithmConfig(), ActorConfig(policy_loss=PolicyLossConfig(loss_mode="kl_cov")))
    assert graph["adv"].writes == ("advantages", "returns", "chosen_tokens")


def test_a_column_nobody_writes_is_an_error_before_start():
    with pytest.raises(ConfigError, match=r"'b' reads column 'values'.*no earlier step"):
        check_graph([Stage("a", (), ("responses",)), Stage("b", ("values",), ())])
    with pytest.raises(ConfigError, match="'b' writes column 'responses', which is written by step 'a'"):
        check_graph([Stage("a", (), ("responses",)), Stage("b", (), ("responses",))])
    with pytest.raises(ConfigError, match="no schema declares"):
        check_graph([Stage("a", (), ("surprise",))])


def test_an_unknown_estimator_is_refused():
    with pytest.raises(
        ConfigError, match=r"adv_estimator must be one of gae, grpo, .*; got 'grop'\. Did you mean 'grpo'"
    ):
        build_graph(AlgorithmConfig(adv_estimator="grop"), ActorConfig())
    with pytest.raises(ConfigError, match="loss_mode must be one of vanilla, gspo"):
        build_graph(AlgorithmConfig(), ActorConfig(policy_loss=PolicyLossConfig(loss_mode="vanila")))


@pytest.mark.parametrize(
    ("build", "key"),
    [
        (lambda: OptimConfig(lr=0), "optim.lr"),
        (lambda: OptimConfig(grad_clip=-1), "optim.grad_clip"),
        (lambda: ActorConfig(ppo_mini_batch_size=-4), "actor.ppo_mini_batch_size"),
        (lambda: ActorConfig(clip_ratio_low=1.5), "actor.clip_ratio_low"),
        (lambda: ActorConfig(loss_agg_mode="mean"), "actor.loss_agg_mode"),
        (lambda: ActorConfig(kl_loss_type="k9"), "actor.kl_loss_type"),
        (lambda: CriticConfig(cliprange_value=0), "critic.cliprange_value"),
        (lambda: AlgorithmConfig(gamma=2), "algorithm.gamma"),
        (lambda: RolloutConfig(n=0), "rollout.n"),
        (lambda: RolloutConfig(temperature=0), "rollout.temperature"),
        (lambda: RolloutConfig(response_length=0), "rollout.response_length"),
        (lambda: LoopConfig(seed=-1), "trainer.seed"),
    ],
)
def test_values_out_of_range_name_their_key(build, key):
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        build()


def test_the_order_of_prompts_covers_each_epoch_once_and_can_be_asked_for_at_any_step():
    order = PromptOrder(10, 4, seed=3)
    rows = [row for step in range(5) for row in order.rows(step)]
    assert sorted(rows[:10]) == list(range(10))
    assert sorted(rows[10:]) == list(range(10))
    assert rows[:10] != rows[10:]
    assert PromptOrder(10, 4, seed=3).rows(2) == rows[8:12]
    assert PromptOrder(10, 4, seed=4).rows(0) != order.rows(0)
    with pytest.raises(ConfigError, match="empty"):
        PromptOrder(0, 1, 0)


def test_prompts_whose_sessions_all_score_alike_are_counted_by_hand():
    """a: 1, 1; b: 0, 1; c: one session, which has nothing to be compared with."""
    assert _equal_groups(["a", "b", "a", "b", "c"], np.array([1.0, 0.0, 1.0, 1.0, 1.0])) == {
        "critic/score/equal_groups": 0.5
    }
    assert _equal_groups(["a", "b"], np.array([1.0, 1.0])) == {}
