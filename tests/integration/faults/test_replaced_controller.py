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
from two_nodes import two_nodes

pytestmark = pytest.mark.timeout(900)
MODEL = Path("checkpoint", "model.safetensors")
TWO_HOSTS = (
    *("trainer.nnodes=2", "transfer_queue.listen=127.0.0.1", "checkpoint_engine.backend=tcp"),
    *("placement=[actor+reward]", "rollout.num_workers=2"),
)


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
    assert_same_end(tmp_path, said, len(kills))


@pytest.mark.nightly
def test_so_does_a_run_over_two_hosts(tmp_path, base_model, mark, monkeypatch):
    """Workers of the other host, too, find the controller that takes its place."""
    monkeypatch.setenv("RL_HOST", "a")
    with two_nodes("a", "b", num_cpus=2) as address:
        more = (*TWO_HOSTS, f"ray.address={address}", "transfer_queue.durability=commit")
        run(tmp_path, "straight", base_model, mark, (), *more)
        said = run(tmp_path, "killed", base_model, mark, (1,), *more)
    assert "host 2: 0 GPUs, 0 CPUs (rollout-1)" in said
    assert_same_end(tmp_path, said, 1)


def assert_same_end(folder: Path, said: str, kills: int) -> None:
    """Check that "killed" got a new controller, and that it ended as "straight"."""
    found = re.findall(
        r"The controller of the data plane (?:on \S+ )?\(process \d+\) was killed by SIGKILL: it alone is started again \(restart (\d)",
        said,
    )
    assert found == [str(number + 1) for number in range(kills)], said
    assert not (folder / "killed" / "attempts").exists()
    assert "resumes" not in said
    assert (folder / "killed" / MODEL).read_bytes() == (folder / "straight" / MODEL).read_bytes()
