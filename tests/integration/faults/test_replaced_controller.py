"""The controller of a data plane with a journal is killed, and its run continues in place."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from app_runs import MARK, PATIENT, command, marked, words_of

pytestmark = pytest.mark.timeout(900)
MODEL = Path("checkpoint", "model.safetensors")


def arguments(root: Path, name: str, base_model: Path | str, *more: str) -> list[str]:
    return command(
        PATIENT,
        f"model.path={base_model}",
        f"trainer.output_dir={root}",
        f"trainer.run_name={name}",
        "trainer.total_training_steps=4",
        "trainer.save_freq=2",
        "trainer.val_before_train=false",
        "trainer.test_freq=0",
        "trainer.deterministic=true",
        "trainer.threads_per_worker=1",
        "actor.use_kl_loss=false",
        "data.val_size=8",
        "data.train_batch_size=8",
        "actor.ppo_mini_batch_size=8",
        "rollout.n=4",
        "rollout.num_workers=1",
        "restart.backoff_s=0.1",
        *more,
    )


def controllers(mark: str) -> list[psutil.Process]:
    return [it for it in marked(mark) if "ControllerSpec" in " ".join(words_of(it))]


def run(root: Path, name: str, base_model: Path | str, mark: str, kills: tuple[int, ...], *more: str) -> str:
    """Finish a run, and kill its controller once it has written so many lines of metrics.

    Returns:
        What it said.
    """
    log, metrics = root / f"{name}.log", root / name / "metrics.jsonl"
    with log.open("w") as out:
        process = subprocess.Popen(
            arguments(root, name, base_model, *more), stdout=out, stderr=out, env={**os.environ, MARK: mark}
        )
        deadline = time.monotonic() + 500
        try:
            for lines in kills:
                while not (metrics.exists() and metrics.read_text().count("\n") >= lines) or not controllers(mark):
                    assert process.poll() is None, log.read_text()
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
                (controller,) = controllers(mark)
                controller.send_signal(signal.SIGKILL)
                controller.wait(60)
            assert process.wait(timeout=500) == 0, log.read_text()
        finally:
            process.kill()
            process.wait(timeout=60)
    return " ".join(log.read_text().split())


@pytest.mark.parametrize(
    ("kills", "more"),
    [
        pytest.param((1,), (), marks=pytest.mark.slow, id="synchronous"),
        pytest.param((0, 1, 2, 3), ("async_rl.max_staleness=1",), marks=pytest.mark.nightly, id="asynchronous"),
    ],
)
def test_a_run_whose_controllers_are_killed_ends_as_one_that_was_left_alone(tmp_path, base_model, mark, kills, more):
    run(tmp_path, "straight", base_model, mark, (), *more)
    said = run(tmp_path, "killed", base_model, mark, kills, *more, "transfer_queue.durability=commit")
    found = re.findall(
        r"The controller of the data plane \(process \d+\) was killed by SIGKILL: it alone is started again \(restart (\d)",
        said,
    )
    assert found == [str(number + 1) for number in range(len(kills))], said
    assert not (tmp_path / "killed" / "attempts").exists()
    assert "resumes" not in said
    assert (tmp_path / "killed" / MODEL).read_bytes() == (tmp_path / "straight" / MODEL).read_bytes()
