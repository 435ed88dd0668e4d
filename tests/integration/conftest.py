"""Fixtures that run the app as a user does: from the command line, in a separate process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from abandoned_memory import no_memory_left

ROOT = Path(__file__).parents[2]
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


@pytest.fixture
def mark():
    """The mark of one test's runs; see `nothing_left`."""
    with nothing_left() as value:
        yield value


@pytest.fixture(scope="session")
def calculator_model(make_demo_model):
    """A model that knows how to call the calculator, but rarely does and mostly guesses."""
    from rl_app_ppo.demo.demos import DEMOS
    from rl_app_ppo.demo.settings import WarmUpSettings

    demo = DEMOS["calculator"]
    settings = WarmUpSettings(
        demo="calculator",
        careless_share=demo.careless_share,
        target_probability=demo.target_probability,
        max_steps=80,
        check_every=20,
        validation_size=128,
    )
    return make_demo_model(settings)


@pytest.fixture
def app(tmp_path, base_model, mark):
    """Run the app for a few small steps; the arguments are overrides."""

    def run(*overrides: str, timeout: float = 500) -> Finished:
        small = (
            f"model.path={base_model}",
            f"trainer.output_dir={tmp_path}",
            "trainer.run_name=run",
            PATIENT,
            "trainer.total_training_steps=2",
            "data.val_size=32",
            "data.train_batch_size=8",
            "actor.ppo_mini_batch_size=8",
            "rollout.num_workers=1",
            # no reference process: the run starts sooner with fewer processes
            "actor.use_kl_loss=false",
            *(["critic.ppo_mini_batch_size=8"] if "algorithm=ppo" in overrides else []),
        )
        done = subprocess.run(
            command(*small, *overrides),
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=tmp_path,
            check=False,
            env={**os.environ, MARK: mark},
        )
        return Finished(done.returncode, done.stdout, done.stderr, tmp_path / "run")

    return run


@pytest.fixture
def run_script(tmp_path, mark):
    """Run a Python script of this text in `tmp_path`, and return the finished process."""

    def run(text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "script.py").write_text(text)
        return subprocess.run(
            [sys.executable, "script.py", *arguments],
            capture_output=True,
            text=True,
            timeout=1100,
            cwd=tmp_path,
            check=False,
            env={**os.environ, MARK: mark},
        )

    return run
