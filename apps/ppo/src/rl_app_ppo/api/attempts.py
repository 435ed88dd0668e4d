"""The attempts at a run: the first one, and those after the death of a process."""

from __future__ import annotations

import asyncio
import logging
import warnings
from collections.abc import Generator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rl_app_ppo.api.event_loop import run_interruptibly
from rl_app_ppo.api.restarts import Death
from rl_app_ppo.cluster.local.fork_server import ForkServer, fork_server
from rl_app_ppo.config.full_keys import RunLog
from rl_app_ppo.config.schema import AppConfig
from rl_app_ppo.driver.restart_policy import RestartPolicy
from rl_app_ppo.driver.run import RunPlan, run
from rl_app_ppo.inputs.input_files import InputFiles
from rl_app_ppo.outputs.console import Screen
from rl_app_ppo.outputs.recorder import Recorder
from rl_app_ppo.outputs.resume import Start, find_start
from rl_app_ppo.outputs.run_folder import RunFiles, remove_partial, set_aside, write_config
from rl_app_ppo.outputs.run_record import RunRecord
from rl_app_ppo.outputs.startup_times import Startup
from rl_app_ppo.watch.live_panel import live_panel
from rl_app_ppo.worker.preloading import worker_modules
from rl_ckpt_engine import PluginPolicy
from rl_protocol import RLError
from rl_trainer import StepGraph
from rl_trainer.data.validation_split import PreparedPrompts

logger = logging.getLogger(__name__)
INTERRUPTED = "interrupted: the run ends its processes, which takes up to 10 s while they start"


@dataclass(frozen=True, kw_only=True)
class Attempts:
    """Trains in a run folder, with the processes of one attempt after the other."""

    config: AppConfig
    written: AppConfig
    """The configuration for the run folder, whose length may be in epochs."""
    graph: StepGraph
    files: RunFiles
    inputs: InputFiles
    """The files that the run reads."""
    data: Mapping[str, PreparedPrompts]
    """The prompts by split."""
    start: Start
    """Of the first attempt."""
    plugins: PluginPolicy
    restarts: RestartPolicy
    screen: Screen
    startup: Startup
    """Of the first attempt."""
    fork_server: ForkServer | None
    """Of the first attempt; see RunPlan."""
    steps_only: bool
    """See RunPlan."""

    def make(self, death: Death | None) -> Recorder:
        """Train to the end of the run.

        Args:
            death: ended the attempt before; None: this is the first one.

        Raises:
            RLError: the run failed; its processes have ended.
            KeyboardInterrupt: it was interrupted; its processes have ended.
        """
        if death is None:
            return self._attempt(self.config, self.start, self.startup, self.fork_server, death)
        remove_partial(self.files.folder)
        trainer = replace(self.config.trainer, resume_mode="auto", run_name=self.files.folder.name)
        config = replace(self.config, trainer=trainer)
        with ExitStack() as stack:
            startup = Startup(self.screen.note)
            stack.callback(startup.end)
            server = None
            if self.fork_server is not None:
                server = stack.enter_context(closing(fork_server(self.fork_server.settings, worker_modules(config))))
            return self._attempt(config, self._newest(config), startup, server, death)

    def _newest(self, config: AppConfig) -> Start:
        """Where the run starts again: at its newest checkpoint, else where it has begun.

        Raises:
            OutputError: all its checkpoints are damaged.
        """
        found = find_start(config, self.files.folder, self.inputs)
        return found if found.checkpoint else replace(found, checkpoint=self.start.checkpoint)

    def _attempt(
        self, config: AppConfig, start: Start, startup: Startup, fork_server: ForkServer | None, death: Death | None
    ) -> Recorder:
        files, screen = self.files, self.screen
        notes = [*start.notes, *(set_aside(files.folder) if start.set_aside else [])]
        write_config(self.written, files)
        with _logged(files.logs / "driver.log"), ExitStack() as stack:
            logger.info("run %s starts", files.folder)
            if death is not None:
                logger.warning(death.note)
            for note in notes:
                logger.info(note)
                screen.note(note)
            after = start.checkpoint.manifest.step if start.checkpoint else 0
            record = stack.enter_context(_recorded(RunRecord(files.record, after, config.trainer.total_training_steps)))
            plan = RunPlan(
                config=config,
                graph=self.graph,
                files=files,
                inputs=self.inputs,
                data=self.data,
                start=start,
                record=record,
                plugins=self.plugins,
                restarts=self.restarts,
                fork_server=fork_server,
                steps_only=self.steps_only,
                nodes_s=config.ray.start_timeout_s if death else 0.0,  # it may have been a node
            )
            if config.trainer.live_panel:
                stack.enter_context(live_panel(files.folder, screen))
            work = _run_after(death.restart.wait_s if death else 0.0, plan, screen, startup)
            return run_interruptibly(work, lambda: screen.note(INTERRUPTED))


async def _run_after(wait_s: float, plan: RunPlan, screen: Screen, startup: Startup) -> Recorder:
    await asyncio.sleep(wait_s)
    return await run(plan, screen, startup)


@contextmanager
def _recorded(record: RunRecord) -> Generator[RunRecord]:
    """Record how the attempt ended."""
    try:
        yield record
    except RLError as error:
        record.end("failed", str(error))
        raise
    except KeyboardInterrupt:
        record.end("interrupted", "")
        raise
    record.end("finished", "")


@contextmanager
def _logged(path: Path) -> Generator[None]:
    """Log to that file, with the reason why the run ended.

    Handlers of the caller print no more than without the run.
    """
    handler = RunLog(path)
    root = logging.getLogger()
    before, theirs = root.level, [(other, other.level) for other in root.handlers]
    for other, level in theirs:
        other.setLevel(max(level, before))
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    shown = warnings.showwarning
    logging.captureWarnings(capture=True)
    captured = warnings.showwarning is shown
    try:
        yield
    except RLError as error:
        logger.error("the run failed: %s", error)
        raise
    except KeyboardInterrupt:
        logger.info("the run was interrupted")
        raise
    finally:
        logging.captureWarnings(capture=captured)
        root.removeHandler(handler)
        root.setLevel(before)
        for other, level in theirs:
            other.setLevel(level)
        handler.close()
