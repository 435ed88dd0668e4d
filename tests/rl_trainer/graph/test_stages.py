"""The step graph, and config values out of range."""

from __future__ import annotations

import pytest

from rl_protocol import BatchData, ConfigError, KVBatchMeta, ragged
from rl_protocol.bridge import Declaration
from rl_trainer import (
    ActorConfig,
    AlgorithmConfig,
    CriticConfig,
    LoopConfig,
    OptimConfig,
    RolloutConfig,
    build_graph,
    check_graph,
    step_columns,
)
from rl_trainer.config import PolicyLossConfig, RolloutCorrectionConfig


def test_the_graph_of_grpo_and_ppo():
    plain = build_graph(AlgorithmConfig(), ActorConfig())
    assert [s.name for s in plain.stages] == [
        "rollout",
        "reward",
        "log_prob_gap",
        "old_log_prob",
        "adv",
        "update_actor",
    ]
    full = build_graph(AlgorithmConfig(adv_estimator="gae"), ActorConfig(use_kl_loss=True))
    assert [s.name for s in full.stages] == [
        "rollout", "reward", "log_prob_gap", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor",
    ]  # fmt: skip
    assert "values" in full["adv"].reads
    assert "ref_log_prob" in full["update_actor"].reads
    assert "data_source" not in full["update_actor"].reads


def test_with_log_probs_of_the_engine_the_old_log_prob_stage_is_left_out():
    graph = build_graph(AlgorithmConfig(old_log_prob="rollout"), ActorConfig())
    assert "log_prob_gap" not in graph
    assert "old_log_prob" not in graph
    for name in ("adv", "update_actor"):
        assert "old_log_probs" not in graph[name].reads
        renamed = graph[name].rename(BatchData({"rollout_log_probs": ragged([[-1.0]], "float32")}))
        assert renamed.field_names == ("old_log_probs",)


def test_versions_move_only_to_the_update_that_interpolates():
    graph = build_graph(AlgorithmConfig(old_log_prob="interpolate"), ActorConfig())
    assert "old_log_prob" not in graph
    assert [stage.name for stage in graph.stages if "rollout_versions" in stage.reads] == ["update_actor"]
    assert "rollout_log_probs" in graph["update_actor"].reads
    for mode in ("auto", "recompute", "rollout"):
        others = build_graph(AlgorithmConfig(old_log_prob=mode), ActorConfig())
        assert not [stage.name for stage in others.stages if "rollout_versions" in stage.reads]
        assert "rollout_versions" in others["rollout"].writes


def test_auto_has_the_columns_of_both_kinds_of_steps():
    graph = build_graph(AlgorithmConfig(), ActorConfig())
    assert graph["log_prob_gap"].reads == ("prompts", "responses", "response_mask", "rollout_log_probs")
    assert graph["log_prob_gap"].writes == ()
    columns = step_columns(AlgorithmConfig(), ActorConfig())
    batch = KVBatchMeta(partition="train", keys=())
    from_engine = KVBatchMeta(partition="train", keys=(), extra_info={"old_log_prob": "rollout"})
    assert columns.for_batch(batch) == columns
    assert columns.for_batch(from_engine) == step_columns(AlgorithmConfig(old_log_prob="rollout"), ActorConfig())


def test_rejection_reaches_actor_and_critic_under_the_name_they_know():
    correction = RolloutCorrectionConfig(rollout_rs=("token_k1",), rollout_rs_threshold=("2",), rollout_is="token")
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
    graph = build_graph(AlgorithmConfig(adv_estimator="gdpo", gdpo_reward_keys=("score", "acc")), ActorConfig())
    assert graph["reward"].writes == ("scores", "acc", "reward_components")
    graph = build_graph(AlgorithmConfig(), ActorConfig(policy_loss=PolicyLossConfig(loss_mode="kl_cov")))
    assert graph["adv"].writes == ("advantages", "returns", "chosen_tokens")


def test_a_column_without_a_writer_is_an_error_before_start():
    with pytest.raises(ConfigError, match=r"'b' reads column 'values'.*no earlier step"):
        check_graph([Declaration("a", (), ("responses",)), Declaration("b", ("values",), ())])
    with pytest.raises(ConfigError, match="'b' writes column 'responses', which is written by step 'a'"):
        check_graph([Declaration("a", (), ("responses",)), Declaration("b", (), ("responses",))])
    with pytest.raises(ConfigError, match="no schema declares"):
        check_graph([Declaration("a", (), ("surprise",))])


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
        (lambda: OptimConfig(lr=-1e-6), "lr"),
        (lambda: OptimConfig(grad_clip=-1), "grad_clip"),
        (lambda: ActorConfig(ppo_mini_batch_size=-4), "ppo_mini_batch_size"),
        (lambda: ActorConfig(clip_ratio_low=1.5), "clip_ratio_low"),
        (lambda: ActorConfig(loss_agg_mode="mean"), "loss_agg_mode"),
        (lambda: ActorConfig(kl_loss_type="k9"), "kl_loss_type"),
        (lambda: CriticConfig(cliprange_value=0), "cliprange_value"),
        (lambda: AlgorithmConfig(gamma=2), "gamma"),
        (lambda: RolloutConfig(n=0), "n"),
        (lambda: RolloutConfig(temperature=0), "temperature"),
        (lambda: RolloutConfig(response_length=0), "response_length"),
        (lambda: LoopConfig(seed=-1), "seed"),
    ],
)
def test_values_out_of_range_name_their_key(build, key):
    with pytest.raises(ConfigError, match=f"^{key} must be "):
        build()
