"""A refused run leaves no folder; a failed run has the reason in its log."""

from __future__ import annotations

import logging

import pytest
from rich.console import Console

from rl_app_ppo.api import training
from rl_app_ppo.checks import facts
from rl_app_ppo.config.loading import load_config
from rl_app_ppo.outputs.startup_times import Startup
from rl_ckpt_engine import PluginPolicy
from rl_protocol import ConfigError, WorkerError


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """launch(error, *overrides): start a run that raises `error` once its folder exists."""
    monkeypatch.setattr(training, "preflight", lambda facts: [])

    def start(error, *overrides):
        async def run(plan, screen, startup):
            assert plan.files.config.exists()
            raise error

        monkeypatch.setattr(training, "run", run)
        startup = Startup(lambda _: None)
        config = load_config([f"trainer.output_dir={tmp_path}/out", "trainer.run_name=a", *overrides])
        try:
            return training.run_training(config, PluginPolicy(), Console(quiet=True), startup, None)
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
        "ERROR rl_app_ppo.api.training: the run failed: no such reward"
        in (tmp_path / "out" / "a" / "logs" / "driver.log").read_text()
    )


def test_a_run_that_fails_has_the_reason_in_its_log(launch, tmp_path):
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    with pytest.raises(WorkerError):
        launch(WorkerError("actor died"))
    assert (root.level, list(root.handlers)) == before, "a library leaves the caller's logging alone"
    assert (
        "ERROR rl_app_ppo.api.training: the run failed: actor died"
        in (tmp_path / "out" / "a" / "logs" / "driver.log").read_text()
    )


def test_a_handler_of_the_caller_gets_no_more_than_without_the_run(launch, tmp_path, monkeypatch):
    theirs = logging.FileHandler(tmp_path / "theirs.log")
    root = logging.getLogger()
    monkeypatch.setattr(root, "level", logging.WARNING)
    root.addHandler(theirs)
    try:
        with pytest.raises(WorkerError):
            launch(WorkerError("actor died"))
    finally:
        root.removeHandler(theirs)
        theirs.close()
    assert theirs.level == logging.NOTSET
    assert (tmp_path / "theirs.log").read_text() == "the run failed: actor died\n"
    assert " starts" in (tmp_path / "out" / "a" / "logs" / "driver.log").read_text()


def test_an_error_of_a_package_and_the_log_have_the_keys_of_the_app(launch, tmp_path):
    with pytest.raises(WorkerError, match=r"raise transfer_queue\.capacity_mb"):
        launch(WorkerError("raise TransferQueueConfig.capacity_mb"))
    assert "raise transfer_queue.capacity_mb" in (tmp_path / "out" / "a" / "logs" / "driver.log").read_text()


def test_a_finished_run_is_not_touched(launch, tmp_path, monkeypatch):
    from rl_app_ppo.outputs.resume import Start

    monkeypatch.setattr(facts, "find_start", lambda config, folder: Start(finished=True, notes=["done already"]))
    result = launch(AssertionError("it was started"), "trainer.resume_mode=auto")
    assert result.run_folder == tmp_path / "out" / "a"
    assert not (tmp_path / "out").exists()


def test_a_finished_run_whose_end_was_cut_removes_its_journal(launch, tmp_path, monkeypatch):
    from rl_app_ppo.outputs.resume import Start
    from rl_transferqueue.journal.disk_journal import open_journal

    monkeypatch.setattr(facts, "find_start", lambda config, folder: Start(finished=True, notes=["done already"]))
    with open_journal(tmp_path / "out" / "a" / "journal"):
        pass
    launch(AssertionError("it was started"), "trainer.resume_mode=auto")
    assert list((tmp_path / "out" / "a").iterdir()) == []
