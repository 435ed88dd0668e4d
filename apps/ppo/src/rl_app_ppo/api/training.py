"""One training run: checks, run folder, log, the run itself, and its outcome."""

from __future__ import annotations

import shutil
import time
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from rl_app_ppo.api.attempts import Attempts
from rl_app_ppo.api.banner import described
from rl_app_ppo.api.restarts import with_restarts
from rl_app_ppo.api.result import TrainResult
from rl_app_ppo.checks.facts import Facts
from rl_app_ppo.checks.registry import preflight
from rl_app_ppo.cluster.local.fork_server import ForkServer
from rl_app_ppo.config.full_keys import full_keys_in_errors
from rl_app_ppo.config.schema import AppConfig
from rl_app_ppo.driver.restart_policy import RestartPolicy
from rl_app_ppo.outputs.answers import read_answers
from rl_app_ppo.outputs.console import Screen
from rl_app_ppo.outputs.recorder import Recorder
from rl_app_ppo.outputs.run_folder import RunFiles, RunFolder, create_run_folder, occupied
from rl_app_ppo.outputs.run_journal import plane_settings, require_journal
from rl_app_ppo.outputs.startup_times import Startup
from rl_app_ppo.report.page import write_report
from rl_ckpt_engine import PluginPolicy
from rl_protocol import ConfigError, RLError
from rl_protocol.errors import UNREADABLE
from rl_trainer.checkpoints.checkpoint_folder import step_of
from rl_trainer.rollout.agents.mcp import forget_servers
from rl_transferqueue.journal.disk_journal import remove_journal

_NO_CHECKPOINT = "it has no checkpoint to resume from; trainer.save_freq=10 writes one every 10 steps"


@full_keys_in_errors()
def run_training(
    config: AppConfig,
    plugins: PluginPolicy,
    out: Console,
    startup: Startup,
    fork_server: ForkServer | None,
    *,
    steps_only: bool = False,
) -> TrainResult:
    """Train as configured, and print the outcome.

    Args:
        config: the configuration of the run.
        plugins: which plug-ins of the weight synchronization the operator allows.
        out: where to print.
        startup: times the phases until the first step.
        fork_server: see RunPlan.
        steps_only: see RunPlan; the folder is temporary: there is no report, and no file is named.

    Raises:
        RLError: the run failed. A run that is refused before its first step leaves no folder; any
            other failure is in its log.
    """
    with startup.phase("preflight", "checking configuration and data"):
        forget_servers()
        facts = Facts(config, plugins)
        warnings = preflight(facts)
        start, folder = facts.start, facts.folder
        written, config = config, facts.with_steps  # the file keeps the epochs: a resumed run may have more
        steps = config.trainer.total_training_steps
    if start.finished:
        _finish_removal(RunFiles(folder=folder.resolve()))
        out.print(Text("\n".join(start.notes)), soft_wrap=True)
        return TrainResult.of(RunFiles(folder=folder.resolve()), steps)
    trainer = config.trainer
    created = create_run_folder(folder, resume=trainer.resume_mode == "auto", named=bool(trainer.run_name))
    if trainer.resume_mode != "auto" and not created.is_new:
        start = replace(start, set_aside=True)
    files = RunFiles(folder=created.path.resolve())
    screen, policy, began = Screen(out), RestartPolicy(config.restart), time.perf_counter()
    attempts = Attempts(
        config=config,
        written=written,
        graph=facts.graph,
        files=files,
        inputs=facts.inputs,
        data=facts.data,
        start=start,
        plugins=plugins,
        restarts=policy,
        screen=screen,
        startup=startup,
        fork_server=fork_server,
        steps_only=steps_only,
    )
    reported = nullcontext() if steps_only else _reported(files, screen)
    with occupied(files.folder), _removed_if_refused(created, files), reported:
        settings = plane_settings(config, files)
        require_journal(settings)
        screen.header(described(config), files.folder)
        for warning in warnings:
            screen.note(warning)
        recorder = with_restarts(attempts.make, policy, screen.note)
        if settings.durability != "off":
            remove_journal(Path(settings.journal_dir))
    _print_outcome(recorder, screen, files)
    out.print(Text(f"{recorder.outcome()} ({time.perf_counter() - began:.0f} s)"), soft_wrap=True)
    if not steps_only:
        screen.paths(files.written())
    return TrainResult.of(files, steps)


def _finish_removal(files: RunFiles) -> None:
    """Remove the journal of a finished run that ended before it had removed its journal.

    One in the folder of transfer_queue.journal_dir stays: it may be of another run by now.
    """
    if files.journal.exists():
        with occupied(files.folder):
            remove_journal(files.journal)


def _print_outcome(recorder: Recorder, screen: Screen, files: RunFiles) -> None:
    """Draw the curves, and print answers to validation prompts."""
    if recorder.validation or recorder.reward:
        screen.curve(recorder.curves)
    try:
        if (answers := read_answers(files.samples)) is not None:
            screen.answers(answers)
    except (OSError, *UNREADABLE) as error:
        screen.note(f"the answers in {files.samples} can't be shown: {error}")


@contextmanager
def _reported(files: RunFiles, screen: Screen) -> Generator[None]:
    """Write the report of a run, also of one that fails or is interrupted in a step, but not of one
    that is refused.
    """
    try:
        yield
    except ConfigError:
        raise
    except RLError:
        _write_report(files, screen, "report: ")
        if how := _how_to_resume(files):
            screen.note(how)
        raise
    except KeyboardInterrupt:
        if files.metrics.exists():
            _write_report(files, screen, "report: ")
            screen.note(_how_to_resume(files) or _NO_CHECKPOINT)
        raise
    _write_report(files, screen)


def _how_to_resume(files: RunFiles) -> str:
    """How to resume a run that has not finished; empty: it can't be."""
    steps = [step for path in files.checkpoints.glob("*") if (step := step_of(path.name)) is not None]
    words = f"give the same command with trainer.run_name={files.folder.name} trainer.resume_mode=auto"
    if steps:
        return f"to resume it after step {max(steps)}, {words}"
    if files.journal.exists():
        return f"to resume it on the responses in its journal, {words}"
    return ""


def _write_report(files: RunFiles, screen: Screen, label: str = "") -> None:
    """Write the report, and print its path after the label if there is one."""
    try:
        write_report([files.folder], files.report)
    except RLError as error:
        screen.note(f"the report can't be written: {error}")
    else:
        if label:
            screen.note(f"{label}{files.report}")


@contextmanager
def _removed_if_refused(folder: RunFolder, files: RunFiles) -> Generator[None]:
    """Remove the new folder of a run that is refused before it writes a metric."""
    try:
        yield
    except ConfigError:
        if folder.is_new and not files.metrics.exists() and not files.attempts.exists():
            shutil.rmtree(folder.path, ignore_errors=True)
        raise
