"""One training run: checks, run folder, log, the run itself, and its outcome."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from rl_app_ppo.api.banner import described
from rl_app_ppo.api.event_loop import run_interruptibly
from rl_app_ppo.api.result import TrainResult
from rl_app_ppo.checks.facts import Facts
from rl_app_ppo.checks.registry import preflight
from rl_app_ppo.cluster.local.fork_server import ForkServer
from rl_app_ppo.config.full_keys import FullKeysFormatter, full_keys_in_errors
from rl_app_ppo.config.schema import AppConfig
from rl_app_ppo.driver.run import RunPlan, run
from rl_app_ppo.outputs.answers import read_answers
from rl_app_ppo.outputs.console import Screen
from rl_app_ppo.outputs.run_folder import RunFiles, RunFolder, create_run_folder, occupied, set_aside, write_config
from rl_app_ppo.outputs.run_journal import plane_settings, require_journal
from rl_app_ppo.outputs.run_record import RunRecord
from rl_app_ppo.outputs.startup_times import Startup
from rl_app_ppo.report.page import write_report
from rl_app_ppo.watch.live_panel import live_panel
from rl_ckpt_engine import PluginPolicy
from rl_protocol import ConfigError, RLError
from rl_transferqueue.journal.disk_journal import remove_journal

logger = logging.getLogger(__name__)


@full_keys_in_errors()
def run_training(
    config: AppConfig, plugins: PluginPolicy, out: Console, startup: Startup, fork_server: ForkServer | None
) -> TrainResult:
    """Train as configured, and print the outcome.

    Args:
        config: the configuration of the run.
        plugins: which plug-ins of the weight synchronization the operator allows.
        out: where to print.
        startup: times the phases until the first step.
        fork_server: see RunPlan.

    Raises:
        RLError: the run failed. A run that is refused before its first step leaves no folder; any
            other failure is in its log.
    """
    with startup.phase("preflight", "checking configuration and data"):
        facts = Facts(config, plugins)
        warnings = preflight(facts)
        written, config, start = (
            config,
            facts.with_steps,
            facts.start,
        )  # the file keeps the epochs: a resumed run may have more
        folder, steps = facts.folder, config.trainer.total_training_steps
    if start.finished:
        _finish_removal(RunFiles(folder=folder.resolve()))
        out.print(Text("\n".join(start.notes)), soft_wrap=True)
        return TrainResult.of(RunFiles(folder=folder.resolve()), steps)
    resume = config.trainer.resume_mode == "auto"
    created = create_run_folder(folder, resume=resume)
    files = RunFiles(folder=created.path.resolve())
    with occupied(files.folder), _removed_if_refused(created, files):
        settings = plane_settings(config, files)
        require_journal(settings)
        notes = [*warnings, *start.notes, *(set_aside(created.path) if start.set_aside else [])]
        write_config(written, files)
        with _logged(files.logs / "driver.log"):
            logger.info("run %s starts", files.folder)
            screen = Screen(out)
            screen.header(described(config), files.folder)
            for note in notes:
                screen.note(note)
            began = time.perf_counter()
            after = start.checkpoint.manifest.step if start.checkpoint else 0
            with _recorded(files, RunRecord(files.record, after, steps), screen) as record:
                plan = RunPlan(
                    config=config,
                    graph=facts.graph,
                    files=files,
                    start=start,
                    record=record,
                    plugins=plugins,
                    fork_server=fork_server,
                )
                with live_panel(files.folder, screen) if config.trainer.live_panel else nullcontext():
                    recorder = run_interruptibly(run(plan, screen, startup))
        if settings.durability != "off":
            remove_journal(Path(settings.journal_dir))
    if recorder.validation or recorder.reward:
        screen.curve(recorder.curves)
    _print_answers(screen, files.samples)
    out.print(Text(f"{recorder.outcome()} ({time.perf_counter() - began:.0f} s)"), soft_wrap=True)
    screen.paths(files.written())
    return TrainResult.of(files, steps)


def _finish_removal(files: RunFiles) -> None:
    """Remove the journal of a finished run that ended before it had removed its journal.

    One in the folder of transfer_queue.journal_dir stays: it may be of another run by now.
    """
    if files.journal.exists():
        with occupied(files.folder):
            remove_journal(files.journal)


def _print_answers(screen: Screen, samples: Path) -> None:
    try:
        if (answers := read_answers(samples)) is not None:
            screen.answers(answers)
    except (OSError, msgspec.DecodeError) as error:
        screen.note(f"the answers in {samples} can't be shown: {error}")


@contextmanager
def _recorded(files: RunFiles, record: RunRecord, screen: Screen) -> Generator[RunRecord]:
    """Record how the run ended, and write its report unless it was refused."""
    try:
        yield record
    except ConfigError as error:
        record.end("failed", str(error))
        raise
    except RLError as error:
        record.end("failed", str(error))
        _write_report(files, screen)
        screen.note(f"report: {files.report}")
        raise
    except KeyboardInterrupt:
        record.end("interrupted", "")
        raise
    record.end("finished", "")
    _write_report(files, screen)


def _write_report(files: RunFiles, screen: Screen) -> None:
    try:
        write_report([files.folder], files.report)
    except RLError as error:
        screen.note(f"the report can't be written: {error}")


@contextmanager
def _removed_if_refused(folder: RunFolder, files: RunFiles) -> Generator[None]:
    """Remove the new folder of a run that is refused before it writes a metric."""
    try:
        yield
    except ConfigError:
        if folder.is_new and not files.metrics.exists():
            shutil.rmtree(folder.path, ignore_errors=True)
        raise


@contextmanager
def _logged(path: Path) -> Generator[None]:
    """Log to that file, with the reason why the run ended.

    Handlers of the caller print no more than without the run.
    """
    handler = logging.FileHandler(path)
    handler.setFormatter(FullKeysFormatter())
    root = logging.getLogger()
    before, theirs = root.level, [(other, other.level) for other in root.handlers]
    for other, level in theirs:
        other.setLevel(max(level, before))
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.captureWarnings(capture=True)
    try:
        yield
    except RLError as error:
        logger.error("the run failed: %s", error)
        raise
    except KeyboardInterrupt:
        logger.info("the run was interrupted")
        raise
    finally:
        logging.captureWarnings(capture=False)
        root.removeHandler(handler)
        root.setLevel(before)
        for other, level in theirs:
            other.setLevel(level)
        handler.close()
