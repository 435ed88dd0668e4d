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
from rl_trainer.metrics import explained_variance, length_stats, mean_by_group, stats
from rl_trainer.scoring import estimate_advantages, row_sums, token_level_rewards


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


def test_mean_by_group():
    assert mean_by_group([1.0, 0.0, 1.0], ["a", "b", "a"]) == {"a": 1.0, "b": 0.0}


def test_the_score_is_on_the_last_token_and_empty_responses_get_none():
    responses = ragged([[1, 2], [], [3]], "int64")
    rewards = token_level_rewards(responses, np.array([0.5, 9.0, 1.0]))
    assert rewards.tolist() == [0.0, 0.5, 1.0]
    assert row_sums(rewards, responses.offsets).tolist() == [0.5, 0.0, 1.0]


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


def test_the_divergence_is_taken_from_the_reward_where_asked():
    meta, data = batch_with_reference()
    config = AlgorithmConfig(use_kl_in_reward=True, kl_coef=0.1, norm_adv_by_std_in_grpo=False)
    columns, metrics = estimate_advantages(meta, data, config, 8)
    # k1 is 1 nat on each token of the first response: its reward is 1 - 0.2, so the group's mean is 0.4
    assert columns.ragged("advantages").values.tolist() == pytest.approx([0.4, 0.4, -0.4])
    assert metrics["critic/rewards/mean"] == pytest.approx(0.4)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(2 / 3)
    assert metrics["actor/entropy"] == pytest.approx(1.0)
    assert metrics["training/rollout_log_probs_diff_max"] == 0.0


def test_the_divergence_is_only_reported_where_it_is_part_of_the_loss():
    meta, data = batch_with_reference()
    _, metrics = estimate_advantages(meta, data, AlgorithmConfig(), 8)
    assert metrics["critic/rewards/mean"] == pytest.approx(0.5)
    assert metrics["actor/ref_kl"] == pytest.approx(2 / 3)


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


def test_a_column_nobody_writes_is_an_error_before_start():
    with pytest.raises(ConfigError, match=r"'b' reads column 'values'.*no earlier stage"):
        check_graph([Stage("a", (), ("responses",)), Stage("b", ("values",), ())])
    with pytest.raises(ConfigError, match="written by stage 'a' and again by 'b'"):
        check_graph([Stage("a", (), ("responses",)), Stage("b", (), ("responses",))])
    with pytest.raises(ConfigError, match="no schema declares"):
        check_graph([Stage("a", (), ("surprise",))])


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ConfigError, match="gae, grpo; got 'grop'"):
        build_graph(AlgorithmConfig(adv_estimator="grop"), ActorConfig())


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
