"""Processes of another host that hang are killed after their heartbeat, and the run goes on.

RL_HOST divides this machine into two hosts: host `a` has the driver.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from app_runs import processes_of, started, words_of
from two_nodes import two_nodes

pytestmark = pytest.mark.timeout(900)
COMMON = (
    *("trainer.nnodes=2", "transfer_queue.listen=127.0.0.1", "checkpoint_engine.backend=tcp"),
    *("trainer.threads_per_worker=1", "trainer.val_before_train=false", "trainer.test_freq=0", "data.val_size=16"),
    *("data.train_batch_size=8", "actor.ppo_mini_batch_size=8", "rollout.num_workers=2", "actor.optim.lr=1e-3"),
    *("restart.heartbeat_s=5", "restart.backoff_s=0.1"),
)
HOST = r"on \S+ \(node [\d.]+\)"


@pytest.fixture
def run_on_two_hosts(tmp_path, base_model, mark, monkeypatch):
    """Start a run on two hosts and stop a process; returns what the run prints, and its steps.

    `victim` gets the folder of the run and returns the process id.
    """
    monkeypatch.setenv("RL_HOST", "a")

    def run(victim: Callable[[Path], int], total: int, *overrides: str) -> tuple[str, int, list[int]]:
        folder = tmp_path / "run"
        more = (f"model.path={base_model}", f"trainer.total_training_steps={total}", *overrides)
        with two_nodes("a", "b", num_cpus=2) as address:
            process = started(mark, folder, *COMMON, *more, f"ray.address={address}", lines=2)
            try:
                stopped = victim(folder)
                os.kill(stopped, signal.SIGSTOP)
                out, err = process.communicate(timeout=400)
            finally:
                process.kill()
                process.communicate()
        assert process.returncode == 0, (out, err)
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        return out, stopped, [json.loads(line)["step"] for line in lines]

    return run


def on_host_b(folder: Path, *names: str) -> int:
    """The newest process of the one of these workers that is on host `b`."""
    newest = [processes_of(folder, name)[-1] for name in names]
    (found,) = [pid for pid in newest if psutil.Process(pid).environ().get("RL_HOST") == "b"]
    return found


@pytest.mark.nightly
def test_a_stopped_rollout_worker_of_another_host_is_killed_and_replaced(run_on_two_hosts):
    alone = ("placement=[actor+reward]", "actor.use_kl_loss=false")
    out, stopped, steps = run_on_two_hosts(lambda folder: on_host_b(folder, "rollout-0", "rollout-1"), 12, *alone)
    killed = rf"Worker (rollout-\d) {HOST} \(process {stopped}\) has not moved for 5 s \(restart\.heartbeat_s\), so it is killed"
    (name,) = re.findall(killed, out)
    assert (
        f"rollout worker {name} is lost and gets a new process (restart 1 of at most 6 an hour, in 0.1 s): Worker {name} on "
        in out
    )
    assert out.count("so it is killed") == 1
    assert "the run starts again" not in out
    assert steps == list(range(1, 13))


@pytest.mark.nightly
def test_a_stopped_rank_of_another_host_is_killed_and_the_run_starts_again(run_on_two_hosts):
    ranks = ("model_engine=fsdp", "fsdp.world_size=2", "fsdp.device=cpu", "placement=actor+ref", "trainer.save_freq=2")

    def rank(folder: Path) -> int:
        deadline = time.monotonic() + 300
        while not [*(folder / "checkpoints").glob("step-*")]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return on_host_b(folder, "actor_ref", "actor_ref-1")

    out, stopped, steps = run_on_two_hosts(rank, 12, *ranks, "actor.use_kl_loss=true")
    assert re.search(rf"Worker actor_ref(-1)? {HOST} \(process {stopped}\) has not moved for 5 s ", out), out
    assert out.count("the run starts again (restart 1 of at most 6 an hour, in 0.1 s): ") == 1
    assert re.search(r"resumes after step \d+ ", out)
    assert steps == list(range(1, 13))


@pytest.mark.nightly
def test_a_stopped_storage_unit_of_another_host_is_killed_and_its_rows_are_generated_again(run_on_two_hosts):
    def unit(_: Path) -> int:
        descendants = psutil.Process().children(recursive=True)
        servers = [one for one in descendants if "rl_transferqueue.launch.server_process" in words_of(one)]
        return next(one.pid for one in servers if one.environ().get("RL_HOST") == "b")

    steps_total = 80  # they take longer than the heartbeat, since no step waits for the unit
    out, stopped, steps = run_on_two_hosts(unit, steps_total, "placement=[actor+reward]", "actor.use_kl_loss=false")
    killed = rf"Storage unit \d of the data plane {HOST} \(process {stopped}\) has not moved for 5 s "
    assert re.search(killed, out), out
    assert steps == list(range(1, steps_total + 1))
