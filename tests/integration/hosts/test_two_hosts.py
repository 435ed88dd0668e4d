"""A run over two nodes of a Ray cluster learns what one host does, bit for bit.

RL_HOST divides this machine into hosts, or network namespaces do: each host has its own storage
units, and the ranks of the model meet through TCP.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from two_namespaces import HEAD, OTHER, PORT, namespaces, private_cluster, run_in, two_nodes_in
from two_nodes import two_nodes

pytestmark = pytest.mark.timeout(900)
RANKS = (
    *("trainer.deterministic=true", "trainer.threads_per_worker=1", "model_engine=fsdp", "fsdp.world_size=2"),
    *("fsdp.device=cpu", "placement=actor+ref", "rollout.num_workers=2", "actor.use_kl_loss=true"),
    *("actor.optim.lr=1e-3", "trainer.val_before_train=false"),
)


@pytest.fixture(scope="module")
def cluster():
    with two_nodes("a", "b", num_cpus=2) as address:
        yield address


def learned(folder: Path, name: str) -> dict[str, np.ndarray]:
    return load_file(folder / name / "checkpoint" / "model.safetensors")


def moved(folder: Path) -> list[list[float]]:
    """Bytes of each of the two steps by link."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    links = ("shared_memory", "loopback", "network")
    found = [[line[f"transfer_queue/bytes_{link}"] for link in links] for line in lines if "actor/pg_loss" in line]
    assert len(found) == 2
    return found


def assert_equal(weights: dict[str, np.ndarray], wanted: dict[str, np.ndarray], before: dict[str, np.ndarray]) -> None:
    assert weights.keys() == wanted.keys() == before.keys()
    assert any((value != before[name]).any() for name, value in wanted.items())
    for name, value in wanted.items():
        np.testing.assert_array_equal(weights[name], value, err_msg=name)


@pytest.mark.slow
def test_two_nodes_learn_what_one_host_does(app, cluster, base_model, monkeypatch):
    alone = app(*RANKS, "trainer.run_name=one")
    more = ("transfer_queue.listen=127.0.0.1", "checkpoint_engine.backend=tcp", f"ray.address={cluster}")
    monkeypatch.setenv("RL_HOST", "a")
    done = app(*RANKS, "trainer.nnodes=2", *more, "trainer.run_name=two")
    assert (alone.code, done.code) == (0, 0), (alone.err, done.err)
    assert "wanted: host 1: 0 GPUs, 0 CPUs (actor_ref, rollout-0, reward)" in done.out
    assert "wanted: host 2: 0 GPUs, 0 CPUs (actor_ref-1, rollout-1)" in done.out
    assert "data plane: 2 storage units on each of 2 hosts" in done.out
    folder = done.folder.parent
    assert all(shared > loopback > network == 0 for shared, loopback, network in moved(folder / "two"))
    assert all(shared > loopback == network == 0 for shared, loopback, network in moved(folder / "one"))
    assert_equal(learned(folder, "two"), learned(folder, "one"), load_file(base_model / "model.safetensors"))


@pytest.mark.nightly
def test_ranks_that_train_on_rows_of_their_own_host_move_fewer_bytes_between_hosts(app, cluster, monkeypatch):
    """Between two hosts of one machine bytes go through loopback."""
    more = ("trainer.nnodes=2", "transfer_queue.listen=127.0.0.1", "checkpoint_engine.backend=tcp")
    free = [*RANKS, *more, f"ray.address={cluster}", "trainer.deterministic=false", "rollout.n=8"]
    monkeypatch.setenv("RL_HOST", "a")
    crossed = list[float]()
    for slack in (0, 0.2):
        done = app(*free, f"trainer.local_rows_slack={slack}", f"trainer.run_name=slack-{slack}")
        assert done.code == 0, done.err
        crossed.append(sum(loopback for _, loopback, _ in moved(done.folder.parent / f"slack-{slack}")))
    assert crossed[1] < 0.8 * crossed[0]


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["tcp", "gloo"])
def test_two_network_namespaces_learn_what_one_host_does(app, base_model, tmp_path, monkeypatch, engine):
    """Ranks and the ends of the weight sync find the cable by the way to the head of Ray: loopback
    leads to no other process.
    """
    alone = app(*RANKS, "trainer.run_name=one")
    assert alone.code == 0, alone.err
    private_cluster(monkeypatch, tmp_path)
    monkeypatch.setenv("RL_CKPT_TRUSTED_NETWORK", "1")  # gloo has no keys
    address, environment = f"{HEAD}:{PORT}", dict(os.environ)
    settings = (
        *(f"model.path={base_model}", f"trainer.output_dir={tmp_path}", "trainer.run_name=two"),
        *("trainer.total_training_steps=2", "data.val_size=32", "data.train_batch_size=8"),
        *("actor.ppo_mini_batch_size=8", f"ray.address={address}", f"transfer_queue.listen={HEAD}"),
        *(f"checkpoint_engine.backend={engine}", "ray.start_timeout_s=400"),
    )
    words = [sys.executable, str(Path(__file__).parents[3] / "apps" / "ppo"), *RANKS, "trainer.nnodes=2", *settings]
    with namespaces() as (first, second), two_nodes_in(first, second, environment):
        done = run_in(first, words)
    assert done.returncode == 0, done.stderr
    assert f"node {HEAD}: " in done.stdout
    assert f"node {OTHER}: " in done.stdout
    assert "data plane: 2 storage units on each of 2 hosts" in done.stdout
    assert all(shared > network > loopback == 0 for shared, loopback, network in moved(tmp_path / "two"))
    assert_equal(learned(tmp_path, "two"), learned(tmp_path, "one"), load_file(base_model / "model.safetensors"))
