"""Which settings go with responses of older weights."""

from __future__ import annotations

import pytest

from rl_protocol import ConfigError
from rl_trainer import ActorConfig, AlgorithmConfig
from rl_trainer.config import AsyncConfig, PolicyLossConfig, RolloutCorrectionConfig
from rl_trainer.graph.config_checks import check_staleness

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
