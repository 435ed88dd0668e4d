"""Which weight engines are accepted, by what they declare."""

from __future__ import annotations

import pytest

import rl_ckpt_engine.registry
from rl_app_ppo.checks.weight_engine import check_sync
from rl_app_ppo.worker.weight_endpoints import make_engine
from rl_ckpt_engine import CheckpointEngineConfig, PluginPolicy
from rl_ckpt_engine.engines.one_host.naive import NaiveEngine
from rl_ckpt_engine.engines.one_host.shm import ShmEngine
from rl_protocol import ConfigError


class InProcess(NaiveEngine):
    """An engine of a user that works within one process."""

    API_VERSION = 1
    name = "in_process"


@pytest.mark.parametrize("name", ["in_process", "delta-in_process", "naive", "delta-naive"])
def test_an_engine_of_one_process_needs_actor_and_rollout_in_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rl_ckpt_engine.registry._REGISTERED, "in_process", InProcess)
    config, policy = CheckpointEngineConfig(backend=name), PluginPolicy()
    with pytest.raises(ConfigError, match=rf"checkpoint_engine\.backend={name} works within one process"):
        check_sync(config, policy)
    assert check_sync(config, policy, one_process=True).name == name


@pytest.mark.parametrize("name", ["shm", "ray"])
def test_an_engine_between_processes_is_accepted_for_either_placement(name: str) -> None:
    """Before Ray has started, too."""
    for one_process in (False, True):
        assert check_sync(CheckpointEngineConfig(backend=name), PluginPolicy(), one_process=one_process).name == name


class Broken(ShmEngine):
    """An engine of a user that can't be created."""

    API_VERSION = 1
    name = "broken"

    def __init__(self, config: CheckpointEngineConfig | None = None) -> None:
        raise ValueError("no such device")


def test_an_engine_that_raises_is_an_error_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rl_ckpt_engine.registry._REGISTERED, "broken", Broken)
    config = CheckpointEngineConfig(backend="broken")
    with pytest.raises(ConfigError, match=r"'broken' can't be created: ValueError: no such device \(.*:\d+\)"):
        check_sync(config, PluginPolicy())
    with pytest.raises(ConfigError, match="'broken' can't be created"):
        make_engine(config, PluginPolicy())
