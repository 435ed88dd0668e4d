"""A node of a Ray cluster is killed, and the run goes on where another has room."""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from app_runs import processes_of, started
from two_nodes import several_nodes

pytestmark = pytest.mark.timeout(900)
COMMON = (
    *("trainer.nnodes=2", "transfer_queue.listen=127.0.0.1", "transfer_queue.shared_memory=false"),
    *("checkpoint_engine.backend=tcp", "trainer.threads_per_worker=1", "trainer.val_before_train=false"),
    *("data.val_size=16", "data.train_batch_size=8", "actor.ppo_mini_batch_size=8", "trainer.test_freq=0"),
    *("rollout.num_workers=2", "actor.optim.lr=1e-3", "restart.backoff_s=0.1"),
)


@contextmanager
def run_on_nodes(mark: str, folder: Path, *overrides: str, lines: int, nodes: int = 3):
    """Yield a run that trains on two of so many nodes besides the head, and the cluster."""
    with several_nodes({"num_cpus": 0}, *[{"num_cpus": 4}] * nodes) as cluster:
        run = started(mark, folder, *COMMON, f"ray.address={cluster.address}", *overrides, lines=lines)
        try:
            yield run, cluster
        finally:
            run.kill()
            run.communicate()


def kill_node_of(cluster, pid: int) -> None:
    """Kill the node on which a process runs."""
    raylets = {node.all_processes["raylet"][0].process.pid: node for node in cluster.worker_nodes}
    (raylet,) = raylets.keys() & {parent.pid for parent in psutil.Process(pid).parents()}
    cluster.remove_node(raylets[raylet], allow_graceful=False)


def steps(folder: Path) -> list[int]:
    metrics = (folder / "metrics.jsonl").read_text().splitlines()
    return [int(json.loads(line)["step"]) for line in metrics]


@pytest.mark.nightly
def test_a_rollout_worker_whose_node_is_killed_gets_a_new_process_on_another(tmp_path, base_model, mark):
    folder, total = tmp_path / "run", 24
    alone = ("placement=[actor+reward]", "actor.use_kl_loss=false", f"trainer.total_training_steps={total}")
    with run_on_nodes(mark, folder, f"model.path={base_model}", *alone, lines=2) as (run, cluster):
        kill_node_of(cluster, processes_of(folder, "rollout-1")[-1])
        out, err = run.communicate(timeout=600)
    assert run.returncode == 0, (out, err)
    assert "rollout worker rollout-1 is lost and gets a new process (restart 1 of at most 6 an hour, in 0.1 s)" in out
    assert "the run starts again" not in out
    assert steps(folder) == list(range(1, total + 1))


@pytest.mark.nightly
def test_a_run_without_another_node_says_which_one_is_gone_and_waits_until_one_joins(tmp_path, base_model, mark):
    folder, total = tmp_path / "run", 24
    alone = ("placement=[actor+reward]", "actor.use_kl_loss=false", f"trainer.total_training_steps={total}")
    with run_on_nodes(mark, folder, f"model.path={base_model}", *alone, nodes=2, lines=2) as (run, cluster):
        kill_node_of(cluster, processes_of(folder, "rollout-1")[-1])
        said = next((line for line in run.stdout if "worker rollout-1 can't start yet: " in line), "")
        cluster.add_node(object_store_memory=80 << 20, num_cpus=4)
        out, err = run.communicate(timeout=300)
    assert run.returncode == 0, (out, err)
    assert re.search(
        r"can't start yet: Node \d+\S+ is gone, and the Ray cluster has no other one for host 2: 0 GPUs, .*\(rollout-1\)\. "
        r"The run waits up to 400 s \(ray\.start_timeout_s\) for a node to join; ",
        said,
    )
    assert steps(folder) == list(range(1, total + 1))


@pytest.mark.nightly
def test_a_run_whose_node_with_a_rank_of_the_actor_is_killed_starts_again_on_another(tmp_path, base_model, mark):
    folder, total = tmp_path / "run", 12
    ranks = ("model_engine=fsdp", "fsdp.world_size=2", "fsdp.device=cpu", "placement=actor+ref", "trainer.save_freq=2")
    more = ("actor.use_kl_loss=true", f"trainer.total_training_steps={total}")
    with run_on_nodes(mark, folder, f"model.path={base_model}", *ranks, *more, lines=3) as (run, cluster):
        kill_node_of(cluster, processes_of(folder, "actor_ref-1")[-1])
        out, err = run.communicate(timeout=400)
    assert run.returncode == 0, (out, err)
    assert "the run starts again (restart 1 of at most 6 an hour, in 0.1 s): " in out
    assert re.search(r"resumes after step \d+ ", out)
    assert steps(folder) == list(range(1, total + 1))


@pytest.mark.nightly
def test_a_run_that_lost_a_rank_waits_for_a_node_to_start_again_on(tmp_path, base_model, mark):
    folder, total = tmp_path / "run", 12
    ranks = ("model_engine=fsdp", "fsdp.world_size=2", "fsdp.device=cpu", "placement=actor+ref", "trainer.save_freq=2")
    more = ("actor.use_kl_loss=true", f"trainer.total_training_steps={total}")
    with run_on_nodes(mark, folder, f"model.path={base_model}", *ranks, *more, nodes=2, lines=3) as (run, cluster):
        kill_node_of(cluster, processes_of(folder, "actor_ref-1")[-1])
        said = list[str]()
        for line in run.stdout:
            said.append(line)
            if "the run waits up to " in line:
                break
        cluster.add_node(object_store_memory=80 << 20, num_cpus=4)
        out, err = run.communicate(timeout=400)
    assert run.returncode == 0, (out, err)
    assert re.search(
        r"up to 400 s \(ray\.start_timeout_s\) for a node to join: .*no node for host 2: .*\(actor_ref-1, ", said[-1]
    )
    assert re.search(r"resumes after step \d+ ", "".join(said))
    assert steps(folder) == list(range(1, total + 1))
