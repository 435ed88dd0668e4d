"""Runs of the app as a user starts them: from the command line, in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import time
import uuid
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import psutil
from abandoned_memory import no_memory_left

ROOT = Path(__file__).parents[3]
PATIENT = "ray.start_timeout_s=400"
"""Workers that import torch while other tests run take a long time to start."""
MARK = "RL_INTEGRATION_TEST"
"""Environment variable that every process of a run inherits."""


@dataclass
class Finished:
    """The outcome of a run that has ended."""

    code: int
    out: str
    err: str
    folder: Path

    @property
    def metrics(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]


def command(*overrides: str) -> list[str]:
    return ["uv", "run", "--no-sync", "--project", str(ROOT), str(ROOT / "apps" / "ppo"), *overrides]


def started(mark: str, folder: Path, *overrides: str, lines: int, timeout_s: float = 400.0) -> subprocess.Popen[str]:
    """Start a run in a new process group; return once `folder` has this many lines of metrics.

    The run continues in the background.
    """
    process = subprocess.Popen(
        command(f"trainer.output_dir={folder.parent}", f"trainer.run_name={folder.name}", PATIENT, *overrides),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder.parent,
        start_new_session=True,
        env={**os.environ, MARK: mark},
    )
    metrics, deadline = folder / "metrics.jsonl", time.monotonic() + timeout_s
    try:
        while not (metrics.exists() and len(metrics.read_text().splitlines()) >= lines):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
    except BaseException:
        process.kill()
        raise
    return process


def marked(mark: str) -> list[psutil.Process]:
    """Return the live processes of the run with this mark."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def words_of(process: psutil.Process) -> list[str]:
    """Return the command line of a process, or nothing if it has ended."""
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def name_of(process: psutil.Process) -> str:
    """Return the name of a process, or nothing if it has ended."""
    with contextlib.suppress(psutil.Error):
        return process.name()
    return ""


def processes_of(folder: Path, worker: str) -> list[int]:
    """Return the process ids of a worker of a run, oldest first, as its log lists them."""
    log = (folder / "logs" / f"{worker}.log").read_text()
    return [int(pid) for pid in re.findall(rf"worker {worker} starts as [\w, ]+, process (\d+)", log)]


@contextlib.contextmanager
def nothing_left() -> Generator[str]:
    """Yield a value of MARK for runs; fail if a process or shared-memory file of them remains."""
    value = uuid.uuid4().hex
    with no_memory_left():
        yield value
        alive = psutil.wait_procs(marked(value), timeout=60)[1]
        assert not alive, [words_of(process) for process in alive]
