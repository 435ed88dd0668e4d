"""One run as its user sees it: checks, the folder, the log, the run itself, and what came out."""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import time
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.text import Text

from rl_app_ppo.console import Screen
from rl_app_ppo.length import with_length
from rl_app_ppo.outputs import RunFolder, create_run_folder, occupied, set_aside
from rl_app_ppo.preflight import preflight
from rl_app_ppo.recorder import RunFiles, write_config
from rl_app_ppo.resume import find_start
from rl_app_ppo.run import RunPlan, run
from rl_app_ppo.schema import AppConfig
from rl_app_ppo.startup import Startup
from rl_ckpt_engine import PluginPolicy
from rl_protocol import ConfigError, RLError

logger = logging.getLogger(__name__)
T = TypeVar("T")


def launch(config: AppConfig, plugins: PluginPolicy, out: Console, startup: Startup) -> None:
    """Train as configured, and print what came out.

    Raises:
        RLError: whatever went wrong. A run that is refused before its first step leaves no folder; any other failure is in its log.
    """
    with startup.phase("preflight", "checking configuration and data"):
        graph = preflight(config, plugins)
        written, config = config, with_length(config)  # a resumed run may have more epochs
        name = config.trainer.run_name or time.strftime(
            f"%Y-%m-%d_%H-%M-%S_{config.algorithm.name}_seed{config.trainer.seed}"
        )
        output_dir = Path(config.trainer.output_dir)
        start = find_start(config, output_dir.expanduser() / name)
    if start.finished:
        out.print(Text("\n".join(start.notes)), soft_wrap=True)
        return
    go_on = config.trainer.resume_mode == "auto"
    made = create_run_folder(output_dir, name, config.trainer.min_free_disk_mb, go_on=go_on)
    files = RunFiles(folder=made.path.resolve())
    with occupied(files.folder), _kept_or_removed(made, files):
        notes = [*start.notes, *(set_aside(made.path) if start.set_aside else [])]
        write_config(written, files)
        with _logged(files.logs / "driver.log"):
            logger.info("run %s starts", files.folder)
            screen = Screen(out)
            screen.header(config, files.folder)
            for note in notes:
                screen.note(note)
            began = time.perf_counter()
            plan = RunPlan(config=config, graph=graph, files=files, start=start, plugins=plugins)
            recorder = asyncio.run(_interruptible(run(plan, screen, startup)))
    if recorder.validation or recorder.reward:
        screen.curve(recorder.curves)
    out.print(Text(f"{recorder.outcome()} ({time.perf_counter() - began:.0f} s)"), soft_wrap=True)
    screen.paths(files.written())


@contextmanager
def _kept_or_removed(made: RunFolder, files: RunFiles) -> Generator[None]:
    """Remove a folder that this run has made where the run is refused before it has written a metric."""
    try:
        yield
    except ConfigError:
        if made.is_new and not files.metrics.exists():
            shutil.rmtree(made.path, ignore_errors=True)
        raise


@contextmanager
def _logged(path: Path) -> Generator[None]:
    """Logging goes to that file; why a run ended, too."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.captureWarnings(capture=True)
    try:
        yield
    except RLError as error:
        logger.error("the run failed: %s", error)
        raise
    except (KeyboardInterrupt, asyncio.CancelledError):
        logger.info("the run was interrupted")
        raise
    finally:
        logging.captureWarnings(capture=False)
        root.removeHandler(handler)
        handler.close()


async def _interruptible(work: Coroutine[Any, Any, T]) -> T:
    """Ctrl-C and SIGTERM end the work in order, once: `uv run` passes on a Ctrl-C that the terminal has sent to us already, and a second
    one must not cut the clean-up short, which is bounded."""
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)

    def end() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, logger.info, "ending already")
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
    return await task
