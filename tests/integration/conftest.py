"""Fixtures that run the app as a user does: from the command line, in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from app_runs import MARK, PATIENT, Finished, command, nothing_left


@pytest.fixture
def mark():
    """The mark of one test's runs; see `nothing_left`."""
    with nothing_left() as value:
        yield value


@pytest.fixture(scope="session")
def calculator_models(make_demo_model):
    """Return a function from the name of a calculator demo to a model that knows how to call the
    tool, but rarely does and mostly guesses.
    """
    from rl_app_ppo.demo.demos import DEMOS
    from rl_app_ppo.demo.settings import WarmUpSettings

    def make(name):
        settings = WarmUpSettings(
            demo=name,
            careless_share=DEMOS[name].careless_share,
            target_probability=DEMOS[name].target_probability,
            max_steps=120,
            check_every=20,
            validation_size=128,
        )
        return make_demo_model(settings)

    return make


@pytest.fixture(scope="session")
def calculator_model(calculator_models):
    """The model of data.demo=calculator."""
    return calculator_models("calculator")


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
