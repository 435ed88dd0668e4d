"""Errors of the packages, which name their own parameters, reach users with the keys of the app."""

from __future__ import annotations

import pytest

from rl_app_ppo.checks.preflight import preflight
from rl_app_ppo.config.full_keys import full_keys_in_errors, with_full_keys
from rl_app_ppo.config.loading import load_config
from rl_ckpt_engine import PluginPolicy
from rl_protocol import CapacityTimeout, ConfigError


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("raise TransferQueueConfig.capacity_mb.", "raise transfer_queue.capacity_mb."),
        ("CheckpointEngineConfig.listen='x' is no", "checkpoint_engine.listen='x' is no"),
        ("set ReplayConfig.on_failure or ReplayConfig.max_attempts", "set replay.on_failure or replay.max_attempts"),
        ("with SamplingParams.max_new_tokens=6", "with rollout.response_length=6"),
        ("RolloutConfig.n is of a base class", "rollout.n is of a base class"),
        ("UpdateConfig.ppo_epochs is of two groups", "UpdateConfig.ppo_epochs is of two groups"),
        ("TransferQueueConfig.unknown, Path.exists and e.g.x", "TransferQueueConfig.unknown, Path.exists and e.g.x"),
    ],
)
def test_a_parameter_gets_its_key(message, shown):
    assert with_full_keys(message) == shown


def test_an_error_keeps_its_type_and_facts():
    with (
        pytest.raises(CapacityTimeout, match=r"^full; raise transfer_queue\.capacity_mb$") as caught,
        full_keys_in_errors(),
    ):
        raise CapacityTimeout("full; raise TransferQueueConfig.capacity_mb", waited_s=3)
    assert caught.value.waited_s == 3


def test_a_wrong_address_of_the_data_plane_is_refused_with_its_key():
    config = load_config(["transfer_queue.listen=nowhere:99999"])
    with pytest.raises(ConfigError, match=r"transfer_queue\.listen='nowhere:99999'"):
        preflight(config, PluginPolicy())
