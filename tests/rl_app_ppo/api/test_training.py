"""A refused run leaves no folder; a failed run has the reason in its log, and may start again."""

from __future__ import annotations

import asyncio
import logging
import warnings
from io import StringIO
from types import FunctionType, SimpleNamespace

import pytest
from rich.console import Console

from rl_app_ppo.api import attempts, training
from rl_app_ppo.checks import facts
from rl_app_ppo.config.loading import load_config
from rl_app_ppo.outputs.startup_times import Startup
from rl_ckpt_engine import PluginPolicy
from rl_protocol import ConfigError, OutputError, WorkerDiedError, WorkerError


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """launch(error, *overrides): start a run that raises `error` once its folder exists.

    Of several errors, or functions of the plan that return one, each ends an attempt.
    `launch.plans` has the plans of the attempts, `launch.out` what was printed.
    """
    monkeypatch.setattr(training, "preflight", lambda facts: [])

    plans = []

    def start(error, *overrides, steps_only=False):
        async def run(plan, screen, startup):
            assert plan.files.config.exists()
            plans.append(plan)
            outcome = error[len(plans) - 1] if isinstance(error, list) else error
            raise outcome(plan) if isinstance(outcome, FunctionType) else outcome

        monkeypatch.setattr(attempts, "run", run)
        startup = Startup(lambda _: None)
        config = load_config([f"trainer.output_dir={tmp_path}/out", "trainer.run_name=a", *overrides])
        try:
            out = Console(file=start.out)
            return training.run_training(config, PluginPolicy(), out, startup, None, steps_only=steps_only)
        finally:
            startup.end()

    start.plans, start.out = plans, StringIO()
    return start


def test_a_run_that_is_refused_leaves_no_folder(launch, tmp_path):
    with pytest.raises(ConfigError, match="no such reward"):
        launch(ConfigError("no such reward"))
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("mode", ["disable", "auto"])
def test_a_start_that_was_interrupted_can_be_repeated_and_keeps_its_files(launch, tmp_path, mode):
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            launch(asyncio.CancelledError(), f"trainer.resume_mode={mode}")
    folder = tmp_path / "out" / "a"
    assert "the run was interrupted" in (folder / "attempts" / "1" / "logs" / "driver.log").read_text()
    assert {path.name for path in folder.iterdir()} == {"attempts", "config.yaml", "logs", "record"}


def test_each_run_asks_the_servers_of_tools_again(launch, monkeypatch):
    done = []
    monkeypatch.setattr(training, "forget_servers", lambda: done.append("forgotten"))
    monkeypatch.setattr(training, "preflight", lambda facts: done.append("checked") or [])
    for _ in range(2):
        with pytest.raises(ConfigError):
            launch(ConfigError("no such reward"))
    assert done == ["forgotten", "checked"] * 2


def test_a_folder_that_was_there_stays(launch, tmp_path):
    (tmp_path / "out" / "a").mkdir(parents=True)
    (tmp_path / "out" / "a" / "mine").write_text("x")
    with pytest.raises(ConfigError):
        launch(ConfigError("no such reward"), "trainer.resume_mode=auto")
    assert (tmp_path / "out" / "a" / "attempts" / "1" / "mine").read_text() == "x"
    assert (
        "ERROR rl_app_ppo.api.attempts: the run failed: no such reward"
        in (tmp_path / "out" / "a" / "logs" / "driver.log").read_text()
    )


def test_a_run_that_fails_has_the_reason_in_its_log(launch, tmp_path):
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    with pytest.raises(WorkerError):
        launch(WorkerError("actor died"))
    assert (root.level, list(root.handlers)) == before, "a library leaves the caller's logging alone"
    assert (
        "ERROR rl_app_ppo.api.attempts: the run failed: actor died"
        in (tmp_path / "out" / "a" / "logs" / "driver.log").read_text()
    )


@pytest.mark.parametrize("captured", [True, False])
def test_a_caller_who_logs_warnings_does_so_after_a_run(launch, captured):
    logging.captureWarnings(captured)
    try:
        before = warnings.showwarning
        with pytest.raises(WorkerError):
            launch(WorkerError("actor died"))
        assert warnings.showwarning is before
    finally:
        logging.captureWarnings(False)


def interrupted(launch, tmp_path, after=lambda files: None, *overrides):
    """What a run prints that is interrupted after a step."""

    def step_done(plan):
        plan.files.metrics.write_text('{"step": 1}\n')
        after(plan.files)
        return KeyboardInterrupt()

    with pytest.raises(KeyboardInterrupt):
        launch([step_done], *overrides)
    assert (tmp_path / "out" / "a" / "report.html").exists()
    return " ".join(launch.out.getvalue().split())


def test_an_interrupted_run_has_a_report_and_says_how_to_resume(launch, tmp_path):
    def publish(files):
        for step in (10, 20):
            (files.checkpoints / f"step-{step:06}").mkdir(parents=True)

    said = interrupted(launch, tmp_path, publish)
    assert f"report: {tmp_path}/out/a/report.html" in said
    assert "after step 20, give the same command with trainer.run_name=a trainer.resume_mode=auto" in said


def test_an_interrupted_run_without_a_checkpoint_says_which_key_writes_them(launch, tmp_path):
    said = interrupted(launch, tmp_path)
    assert "no checkpoint to resume from; trainer.save_freq=10" in said


def test_an_interrupted_run_with_a_journal_resumes_without_a_checkpoint(launch, tmp_path):
    said = interrupted(launch, tmp_path, lambda files: files.journal.mkdir(), "transfer_queue.durability=commit")
    assert "responses in its journal, give the same command" in said


@pytest.mark.parametrize("steps", [(), (5, 10)])
def test_a_run_that_fails_says_how_to_resume_it_if_that_is_possible(launch, steps):
    def fail(plan):
        for step in steps:
            (plan.files.checkpoints / f"step-{step:06}").mkdir(parents=True)
        return OutputError("The checkpoint can't be written: No space left on device.")

    with pytest.raises(OutputError):
        launch([fail])
    said = " ".join(launch.out.getvalue().split())
    how = "to resume it after step 10, give the same command with trainer.run_name=a trainer.resume_mode=auto"
    assert (how in said) == bool(steps)
    assert "trainer.save_freq" not in said


@pytest.mark.parametrize("error", [KeyboardInterrupt(), WorkerError("actor died")])
def test_a_benchmark_that_ends_early_names_no_report_and_no_way_to_resume(launch, error):
    """Its folder is temporary."""

    def step_done(plan):
        plan.files.metrics.write_text('{"step": 1}\n')
        return error

    with pytest.raises(type(error)):
        launch([step_done], steps_only=True)
    said = launch.out.getvalue()
    assert "report" not in said
    assert "resume" not in said


def test_a_report_that_cannot_be_written_is_not_named_and_leaves_nothing(launch, tmp_path):
    def fails(plan):
        plan.files.report.mkdir()  # as a full disk: the file can't be put there
        return WorkerError("actor died")

    with pytest.raises(WorkerError):
        launch([fails])
    said = " ".join(launch.out.getvalue().split())
    assert "the report can't be written: " in said
    assert "report: " not in said
    assert not (tmp_path / "out" / "a" / ".report.html").exists()


def test_a_run_that_is_interrupted_before_its_first_step_has_no_report(launch, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        launch(KeyboardInterrupt())
    assert not (tmp_path / "out" / "a" / "report.html").exists()


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

    monkeypatch.setattr(
        facts, "find_start", lambda config, folder, inputs: Start(finished=True, notes=["done already"])
    )
    result = launch(AssertionError("it was started"), "trainer.resume_mode=auto")
    assert result.run_folder == tmp_path / "out" / "a"
    assert not (tmp_path / "out").exists()


def test_a_finished_run_whose_end_was_cut_removes_its_journal(launch, tmp_path, monkeypatch):
    from rl_app_ppo.outputs.resume import Start
    from rl_transferqueue.journal.disk_journal import open_journal

    monkeypatch.setattr(
        facts, "find_start", lambda config, folder, inputs: Start(finished=True, notes=["done already"])
    )
    with open_journal(tmp_path / "out" / "a" / "journal"):
        pass
    launch(AssertionError("it was started"), "trainer.resume_mode=auto")
    assert list((tmp_path / "out" / "a").iterdir()) == []


DIED = WorkerDiedError("Worker actor died during update_actor: it was killed.")


def test_a_run_whose_process_dies_before_a_checkpoint_starts_over_and_loses_no_file(launch, tmp_path):
    with pytest.raises(WorkerError, match="bad row"):
        launch([DIED, DIED, WorkerError("bad row")], "restart.backoff_s=0.001")
    first, second, third = launch.plans
    assert [plan.config.trainer.resume_mode for plan in launch.plans] == ["disable", "auto", "auto"]
    assert first.restarts is second.restarts is third.restarts
    assert third.start.checkpoint is None
    folder = tmp_path / "out" / "a"
    for number, why in (("1", ""), ("2", "restart 1 of at most 6 an hour, in 0.001 s")):
        log = (folder / "attempts" / number / "logs" / "driver.log").read_text()
        assert "the run failed: Worker actor died" in log
        assert why in log
    assert "restart 2 of at most 6 an hour, in 0.002 s" in (folder / "logs" / "driver.log").read_text()
    assert "resume_mode: disable" in (folder / "config.yaml").read_text(), "the configuration is that of the user"


def test_a_run_that_is_refused_when_it_starts_again_keeps_its_folder(launch, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(
        WorkerDiedError, match=r"^trainer.nnodes=2 needs 2 hosts. The run was started again before: .*Worker actor died"
    ):
        launch([DIED, ConfigError("trainer.nnodes=2 needs 2 hosts.")], "restart.backoff_s=0")
    assert (tmp_path / "out" / "a" / "attempts" / "1" / "config.yaml").exists()


def test_a_run_from_a_checkpoint_starts_again_from_it(launch, tmp_path, monkeypatch):
    from rl_app_ppo.outputs.resume import Start

    checkpoint = SimpleNamespace(manifest=SimpleNamespace(step=3), folder=tmp_path / "other" / "step-000003")
    monkeypatch.setattr(facts, "find_start", lambda config, folder, inputs: Start(checkpoint=checkpoint))
    found = []

    def find_start(config, folder, inputs):
        found.append([path.name for path in (folder / "checkpoints").iterdir()])
        return Start()

    def die_in_save(plan):
        (plan.files.checkpoints / ".saving-step-000004").mkdir(parents=True)
        return DIED

    monkeypatch.setattr(attempts, "find_start", find_start)
    with pytest.raises(WorkerError, match="bad row"):
        launch([die_in_save, WorkerError("bad row")], "restart.backoff_s=0", f"trainer.resume_mode={checkpoint.folder}")
    assert [plan.start.checkpoint for plan in launch.plans] == [checkpoint, checkpoint]
    assert found == [[]], "half a checkpoint is removed before the newest one is looked for"
