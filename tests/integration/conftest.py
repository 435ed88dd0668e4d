"""Running the app as a user would: in a process of its own, from the command line."""

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
import pytest

ROOT = Path(__file__).parents[2]
MARK = "RL_INTEGRATION_TEST"
"""Environment variable that every process of a run inherits."""


@dataclass
class Finished:
    """A run that ended."""

    code: int
    out: str
    err: str
    folder: Path

    @property
    def metrics(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]


def command(*overrides: str) -> list[str]:
    return ["uv", "run", "--no-sync", "--project", str(ROOT), str(ROOT / "apps" / "ppo"), *overrides]


def started(mark: str, folder: Path, *overrides: str, lines: int, timeout_s: float = 120.0) -> subprocess.Popen[str]:
    """A run in a process group of its own, as a shell starts it, that has written so many lines of metrics into `folder` and goes on."""
    process = subprocess.Popen(
        command(f"trainer.output_dir={folder.parent}", f"trainer.run_name={folder.name}", *overrides),
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
    """Live processes of the run with this mark."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def processes_of(folder: Path, worker: str) -> list[int]:
    """Process ids that a worker of a run has had, in order, as its log says."""
    log = (folder / "logs" / f"{worker}.log").read_text()
    return [int(pid) for pid in re.findall(rf"worker {worker} starts as \w+, process (\d+)", log)]


def shared_memory() -> set[str]:
    """Names of files in shared memory. Semaphores (`sem.`) are left out: none is of this project, and other programs come and go."""
    return {entry.name for entry in Path("/dev/shm").iterdir() if not entry.name.startswith("sem.")}


@contextlib.contextmanager
def nothing_left() -> Generator[str]:
    """Value of MARK for some runs; fails when a process or a shared-memory file outlives them."""
    value, memory = uuid.uuid4().hex, shared_memory()
    yield value
    alive = psutil.wait_procs(marked(value), timeout=15)[1]
    assert not alive, [process.cmdline() for process in alive]
    assert shared_memory() <= memory


@pytest.fixture
def mark():
    """See nothing_left: of the runs of one test."""
    with nothing_left() as value:
        yield value


@pytest.fixture(scope="session")
def calculator_model(demo_models):
    """One that knows how the calculator is called, seldom does, and mostly guesses."""
    from rl_app_ppo.demo.demos import DEMOS
    from rl_app_ppo.demo.settings import WarmUpSettings
    from rl_app_ppo.demo.warmup import cached_base_model

    demo = DEMOS["calculator"]
    settings = WarmUpSettings(
        demo="calculator",
        careless_share=demo.careless_share,
        target_probability=demo.target_probability,
        max_steps=80,
        check_every=20,
        validation_size=128,
    )
    return cached_base_model(demo_models, settings)


@pytest.fixture
def app(tmp_path, base_model, mark):
    """Run the app for a few small steps; arguments override."""

    def run(*overrides: str, timeout: float = 150) -> Finished:
        small = (
            f"model.path={base_model}",
            f"trainer.output_dir={tmp_path}",
            "trainer.run_name=run",
            "trainer.total_training_steps=2",
            "data.val_size=32",
            "data.train_batch_size=8",
            "actor.ppo_mini_batch_size=8",
            "rollout.num_workers=1",
            "actor.use_kl_loss=false",  # no reference process: a run that starts fewer processes starts sooner
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
