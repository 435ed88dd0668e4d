"""Which settings go with responses of older weights, and which parts of the loss go together."""

from __future__ import annotations

import pytest

from rl_protocol import ConfigError
from rl_trainer import ActorConfig, AlgorithmConfig
from rl_trainer.algorithms.old_log_prob import old_log_prob_mode
from rl_trainer.config import AsyncConfig, FilterGroupsConfig, OverlongConfig, PolicyLossConfig, RolloutCorrectionConfig
from rl_trainer.graph.config_checks import check_combination, check_staleness

GPG = ActorConfig(policy_loss=PolicyLossConfig(loss_mode="gpg"))
REMAX = AlgorithmConfig(adv_estimator="remax")
CORRECTED = AlgorithmConfig(rollout_correction=RolloutCorrectionConfig(rollout_is="token"))


@pytest.mark.parametrize(
    ("algorithm", "actor", "words"),
    [
        (AlgorithmConfig(), GPG, r"set RolloutCorrectionConfig\.rollout_is=token"),
        (REMAX, ActorConfig(), r"adv_estimator=remax .* set AsyncConfig\.max_staleness=0 \(got 2\)"),
    ],
)
def test_what_older_weights_would_spoil_is_refused(algorithm, actor, words):
    check_staleness(AsyncConfig(), algorithm, actor)
    with pytest.raises(ConfigError, match=words):
        check_staleness(AsyncConfig(max_staleness=2), algorithm, actor)


@pytest.mark.parametrize("bound", [0, 1])
def test_interpolation_needs_weights_of_two_versions_before(bound):
    """Otherwise the old policy is the one that generated."""
    algorithm = AlgorithmConfig(old_log_prob="interpolate")
    check_staleness(AsyncConfig(max_staleness=2), algorithm, ActorConfig())
    with pytest.raises(
        ConfigError,
        match=rf"AsyncConfig\.max_staleness={bound} excludes; set that to at least 2, or old_log_prob=rollout",
    ):
        check_staleness(AsyncConfig(max_staleness=bound), algorithm, ActorConfig())


def test_a_ratio_or_a_correction_makes_older_weights_usable():
    check_staleness(AsyncConfig(max_staleness=2), AlgorithmConfig(), ActorConfig())
    check_staleness(AsyncConfig(max_staleness=2), CORRECTED, GPG)


SFT = {"rl_coef": 0.0, "sft_coef": 1.0}


def test_r2_needs_the_pass_before_the_update():
    assert old_log_prob_mode(AlgorithmConfig(router_replay="R2")) == "recompute"
    assert old_log_prob_mode(AlgorithmConfig(router_replay="R3")) == "auto"
    check_combination(AlgorithmConfig(router_replay="R3", **SFT), ActorConfig(), 1)
    with pytest.raises(ConfigError, match=r"rl_coef=0 computes no policy loss .* for which .*router_replay=R2 is"):
        check_combination(AlgorithmConfig(router_replay="R2", **SFT), ActorConfig(), 1)
    for settings in ({"old_log_prob": "rollout"}, {"old_log_prob": "interpolate"}):
        AlgorithmConfig(router_replay="R3", **settings)
        with pytest.raises(ConfigError, match=r"router_replay must be disabled or R3 without the pass .* got '?R2'?"):
            AlgorithmConfig(router_replay="R2", **settings)


@pytest.mark.parametrize(
    ("algorithm", "n", "words"),
    [
        ({"rl_coef": 0.0}, 1, r"AlgorithmConfig\.rl_coef=0 leaves nothing to train on; set AlgorithmConfig\.sft_coef"),
        (SFT, 8, r"RolloutConfig\.n must be 1 with AlgorithmConfig\.rl_coef=0 .*; got 8"),
        ({**SFT, "adv_estimator": "remax"}, 1, r"rl_coef=0 .* for which AlgorithmConfig\.adv_estimator=remax is"),
        ({**SFT, "use_kl_in_reward": True}, 1, r"rl_coef=0 .* for which AlgorithmConfig\.use_kl_in_reward=true is"),
        ({"sft_coef": 0.5}, 2, r"RolloutConfig\.n must be at least 3 .*sft_coef above 0 makes one the data's"),
        ({"sft_coef": 0.5, "adv_estimator": "gae"}, 8, r"sft_coef=0\.5 adds an answer .*adv_estimator=gae would take"),
        ({"echo_coef": 0.5, "adv_estimator": "gae"}, 8, r"echo_coef=0\.5 adds tokens .*adv_estimator=gae"),
        ({"echo_coef": 0.5, "old_log_prob": "rollout"}, 8, r"echo_coef=0\.5 adds tokens .*old_log_prob=rollout"),
        ({"sft_coef": 0.5, "old_log_prob": "rollout"}, 8, r"which AlgorithmConfig\.old_log_prob=rollout would take"),
        (
            {"sft_coef": 0.5, "filter_groups": FilterGroupsConfig(enable=True)},
            8,
            r"which FilterGroupsConfig\.enable=true would take",
        ),
    ],
)
def test_parts_of_the_loss_that_do_not_go_together(algorithm, n, words):
    check_combination(AlgorithmConfig(), ActorConfig(), 8)
    check_combination(AlgorithmConfig(**SFT), ActorConfig(), 1)
    check_combination(AlgorithmConfig(sft_coef=0.5), ActorConfig(), 3)
    with pytest.raises(ConfigError, match=words):
        check_combination(AlgorithmConfig(**algorithm), ActorConfig(), n)


@pytest.mark.parametrize("mode", ["rollout", "interpolate"])
def test_the_second_moment_of_a_batch_is_not_known_inside_the_loss(mode):
    correction = RolloutCorrectionConfig(rollout_rs=("batch_m2",), rollout_rs_threshold=("0.04",))
    check_combination(AlgorithmConfig(rollout_correction=correction), ActorConfig(), 8)
    with pytest.raises(ConfigError, match=rf"rollout_rs=batch_m2 looks at the whole batch .*old_log_prob={mode}"):
        check_combination(AlgorithmConfig(rollout_correction=correction, old_log_prob=mode), ActorConfig(), 8)


def test_answers_alone_may_be_of_any_age():
    """There is no ratio to an old policy."""
    check_staleness(AsyncConfig(max_staleness=2), AlgorithmConfig(**SFT), GPG)


@pytest.mark.parametrize(
    ("algorithm", "n", "words"),
    [
        ({"by_source": ("adv_estimator=gae@a",)}, 4, r"a critic, such as gae, and others one without.*grpo and gae"),
        ({"by_source": ("rl_coef=0@a",)}, 4, r"nothing to train on in rows of data_source='a'"),
        ({"by_source": ("ref_kl_coef=0@a",)}, 4, r"ref_kl_coef@a weighs the divergence .*use_kl_loss=false"),
        ({"by_source": ("lam=0.5@a",)}, 4, r"lam@a has no effect with adv_estimator=grpo; .* uses lam: gae\.$"),
        ({"by_source": ("gamma=0.5@a", "adv_estimator=rloo@a")}, 4, r"gamma@a has no effect .*=rloo; .*: gae, .*gigpo"),
        (
            {"adv_estimator": "reinforce_plus_plus", "by_source": ("rl_coef=0@a", "sft_coef=1@a", "gamma=0.5@a")},
            4,
            r"gamma@a has no effect with rl_coef=0",
        ),
        (
            {"by_source": ("norm_adv_by_std_in_grpo=false@a", "adv_estimator=rloo@a")},
            4,
            r"by_source: norm_adv_by_std_in_grpo@a has no effect .*=rloo; .*: grpo, grpo_passk, gdpo, gigpo\.$",
        ),
        ({"by_source": ("adv_estimator=rlo@a",)}, 4, r"adv_estimator.*'rlo'.*Did you mean 'rloo'"),
        ({"by_source": ("sft_coef=1@a",)}, 2, r"n must be at least 3 .*grpo"),
        ({"by_source": ("adv_estimator=gdpo@a",)}, 4, r"gdpo_reward_keys goes with .*grpo and gdpo"),
        ({"by_source": ("sft_coef=1@a",), "old_log_prob": "rollout"}, 4, r"sft_coef=1 adds an answer"),
        ({"by_source": ("rl_coef=0@a", "sft_coef=1@a"), "rl_coef": 0.0, "sft_coef": 1.0}, 4, r"n must be 1"),
    ],
)
def test_what_the_settings_of_a_source_can_not_be_combined_with(algorithm, n, words):
    with pytest.raises(ConfigError, match=words):
        check_combination(AlgorithmConfig(**algorithm), ActorConfig(), n)


@pytest.mark.parametrize("settings", [("rl_coef=0@a",), ("rl_coef=1@a",)])
def test_a_critic_does_not_learn_from_rows_without_returns(settings):
    algorithm = AlgorithmConfig(adv_estimator="gae", rl_coef=float(settings == ("rl_coef=0@a",)), by_source=settings)
    with pytest.raises(ConfigError, match=r"rl_coef=0 leaves some rows without returns, which the critic of .*=gae"):
        check_combination(algorithm, ActorConfig(use_kl_loss=True), 1)
    check_combination(AlgorithmConfig(adv_estimator="gae", by_source=("rl_coef=0.5@a",)), ActorConfig(), 1)
    without = AlgorithmConfig(adv_estimator="reinforce_plus_plus", by_source=("rl_coef=0@a",))
    check_combination(without, ActorConfig(use_kl_loss=True), 1)


def test_sources_with_answers_alone_beside_others_with_rewards():
    """Two responses are enough for GRPO: all those to prompts with answers alone are answers."""
    config = AlgorithmConfig(by_source=("rl_coef=0@a", "sft_coef=1@a"))
    check_combination(config, ActorConfig(), 2)
    assert old_log_prob_mode(config) == "recompute"


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (
            {"use_kl_in_reward": True},
            r"adv_estimator=maxrl needs rewards of at least 0.* set it to false and ActorConfig\.use_kl_loss",
        ),
        ({}, r"adv_estimator=maxrl needs rewards of at least 0.* OverlongConfig\.buffer_len=4 .* set it to 0"),
    ],
)
def test_an_estimator_without_negative_rewards_refuses_penalties(algorithm, message):
    config, penalty = AlgorithmConfig(adv_estimator="maxrl", **algorithm), OverlongConfig(buffer_len=4)
    with pytest.raises(ConfigError, match=message):
        check_combination(config, ActorConfig(), 8, penalty)
    check_combination(AlgorithmConfig(adv_estimator="maxrl"), ActorConfig(), 8, OverlongConfig())
    check_combination(AlgorithmConfig(adv_estimator="grpo", **algorithm), ActorConfig(), 8, penalty)
