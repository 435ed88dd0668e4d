"""A run starts its own Ray, and refuses a process in which that can't be had privately."""

from __future__ import annotations

import asyncio
import errno
import os
import platform
import tempfile
import threading
from functools import partial

import pytest
import ray
from ray._private import ray_constants
from ray._private.utils import check_version_info

from rl_app_ppo.cluster import ray_session
from rl_app_ppo.cluster.ray_session import check_ray_is_free
from rl_app_ppo.config.schema import RayConfig, TrainerConfig
from rl_protocol import ConfigError, OutputError, WorkerError


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


def test_a_token_of_the_caller_is_back_after_the_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(ray_session.TOKEN_PATH, "mine")
    with ray_session.private_folder() as folder:
        assert os.environ[ray_session.TOKEN_PATH] == str(folder.with_name("token"))
    assert os.environ[ray_session.TOKEN_PATH] == "mine"


def test_a_folder_of_ray_without_room_is_an_error_of_the_output(monkeypatch: pytest.MonkeyPatch):
    def full(*_args: object, **_settings: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with (
        pytest.raises(OutputError, match=r"The folder of Ray can't .*: No space left on device\. .*RAY_TMPDIR"),
        ray_session.private_folder(),
    ):
        raise AssertionError("there is none")


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/tmp/logs"), ".*No space left on device: '/tmp/logs'"),
        (Exception("The current node timed out during startup."), "The current node timed out during startup"),
    ],
)
def test_any_error_while_ray_starts_ends_the_run_with_its_reason(
    error: Exception, why: str, monkeypatch: pytest.MonkeyPatch
):
    def fail(**_settings: object) -> None:
        raise error

    async def session() -> None:
        async with ray_session.ray_session(RayConfig(address="auto"), TrainerConfig(), None):
            raise AssertionError("it has not started")

    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(WorkerError, match=rf"Ray did not start \(auto\): {why}\."):
        asyncio.run(session())


def _init(done: threading.Event, **_settings: object) -> None:
    """ray.init, which returns when `done` is set."""
    assert done.wait(60)


def test_a_ray_that_never_starts_ends_the_run_and_is_left_if_it_starts_later(monkeypatch: pytest.MonkeyPatch):
    released, left = threading.Event(), threading.Event()
    monkeypatch.setattr(ray, "init", partial(_init, released))
    monkeypatch.setattr(ray, "shutdown", left.set)
    monkeypatch.setattr(ray_session, "LATE_S", 0.01)

    async def session() -> None:
        config = RayConfig(address="127.0.0.1:6379", start_timeout_s=0.01)
        async with ray_session.ray_session(config, TrainerConfig(), None):
            raise AssertionError("it has not started")

    with pytest.raises(
        WorkerError, match=r"\(127\.0\.0\.1:6379\): it was not ready within 0\.01 s \(ray\.start_timeout_s\)\. Stop"
    ):
        asyncio.run(session())
    assert not left.is_set()
    released.set()
    assert left.wait(60)


def test_a_ray_that_starts_in_time_is_left_at_the_end(monkeypatch: pytest.MonkeyPatch):
    done, left = threading.Event(), threading.Event()
    done.set()
    monkeypatch.setattr(ray, "init", partial(_init, done))
    monkeypatch.setattr(ray, "shutdown", left.set)

    async def session() -> None:
        async with ray_session.ray_session(RayConfig(address="auto"), TrainerConfig(), None):
            assert not left.is_set()

    asyncio.run(session())
    assert left.is_set()


@pytest.mark.parametrize("theirs", [{"ray_version": "1.13.0"}, {"python_version": "3.8.2"}])
def test_a_cluster_of_another_ray_or_python_is_refused_with_both_versions(
    monkeypatch: pytest.MonkeyPatch, theirs: dict[str, str]
) -> None:
    ours = {"ray_version": ray.__version__, "python_version": platform.python_version()}

    def init(**_settings: object) -> None:
        check_version_info(ours | theirs, "this process")

    monkeypatch.setattr(ray, "init", init)

    async def session() -> None:
        async with ray_session.ray_session(RayConfig(address="10.0.0.1:6379"), TrainerConfig(), None):
            raise AssertionError("it has not started")

    (key, version), *_ = theirs.items()
    with pytest.raises(ConfigError) as refused:
        asyncio.run(session())
    for word in ("ray.address=10.0.0.1:6379", version, ours[key], "ray.address=local"):
        assert word in str(refused.value)
