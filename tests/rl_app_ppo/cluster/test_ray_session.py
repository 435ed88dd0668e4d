"""A run starts its own Ray, and refuses a process in which that can't be had privately."""

from __future__ import annotations

import pytest
import ray
from ray._private import ray_constants

from rl_app_ppo.cluster.ray_session import check_ray_is_free
from rl_app_ppo.config.schema import RayConfig
from rl_protocol import ConfigError


def test_a_process_that_uses_ray_itself_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match=r"ray\.shutdown\(\) before train\(\)"):
        check_ray_is_free(RayConfig(address="auto"))


def test_a_ray_that_would_listen_on_all_interfaces_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", True)
    with pytest.raises(ConfigError, match="RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0"):
        check_ray_is_free(RayConfig())
    check_ray_is_free(RayConfig(address="auto"))  # the cluster decides
    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", False)
    check_ray_is_free(RayConfig())
