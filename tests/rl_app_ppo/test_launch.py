"""A run that is refused leaves no folder, and one that fails has the reason in its log."""

from __future__ import annotations

import pytest
from rich.console import Console

from rl_app_ppo import launch as launching
from rl_app_ppo.config import load_config
from rl_app_ppo.startup import Startup
from rl_ckpt_engine import PluginPolicy
from rl_protocol import ConfigError, WorkerError


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """launch(error, *overrides): a run that raises `error` once its folder is there."""
    monkeypatch.setattr(launching, "preflight", lambda config, plugins: None)

    def start(error, *overrides):
        async def run(plan, screen, startup):
            assert plan.files.config.exists()
            raise error

        monkeypatch.setattr(launching, "run", run)
        startup = Startup(lambda _: None)
        config = load_config([f"trainer.output_dir={tmp_path}/out", "trainer.run_name=a", *overrides])
        try:
            launching.launch(config, PluginPolicy(), Console(quiet=True), startup)
        finally:
            startup.end()

    return start


def test_a_run_that_is_refused_leaves_no_folder(launch, tmp_path):
    with pytest.raises(ConfigError, match="no such reward"):
        launch(ConfigError("no such reward"))
    assert list((tmp_path / "out").iterdir()) == []


def test_a_folder_that_was_there_stays(launch, tmp_path):
    (tmp_path / "out" / "a").mkdir(parents=True)
    (tmp_path / "out" / "a" / "mine").write_text("x")
    with pytest.raises(ConfigError):
        launch(ConfigError("no such reward"), "trainer.resume_mode=auto")
    assert (tmp_path / "out" / "a" / "attempts" / "1" / "mine").read_text() == "x"
    assert (
        "ERROR rl_app_ppo.launch: the run failed: no such reward"
        in (tmp_path / "out" / "a" / "logs" / "driver.log").read_text()
    )


def test_a_run_that_fails_has_the_reason_in_its_log(launch, tmp_path):
    with pytest.raises(WorkerError):
        launch(WorkerError("actor died"))
    assert (
        "ERROR rl_app_ppo.launch: the run failed: actor died"
        in (tmp_path / "out" / "a" / "logs" / "driver.log").read_text()
    )


def test_a_finished_run_is_not_touched(launch, tmp_path, monkeypatch):
    from rl_app_ppo.resume import Start

    monkeypatch.setattr(launching, "find_start", lambda config, folder: Start(finished=True, notes=["done already"]))
    launch(AssertionError("it was started"), "trainer.resume_mode=auto")
    assert not (tmp_path / "out").exists()
