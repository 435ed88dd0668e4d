"""Roles in one process and in a process each learn the same, bit for bit."""

from __future__ import annotations

import json

import numpy as np
import pytest
from app_runs import processes_of
from safetensors.numpy import load_file

pytestmark = pytest.mark.timeout(900)
PINNED = ("trainer.threads_per_worker=1", "actor.use_kl_loss=true", "actor.optim.lr=1e-3", "rollout.num_workers=1")


@pytest.mark.nightly
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
@pytest.mark.parametrize(
    ("placement", "process"), [("fused", "actor_ref_{}rollout"), ("actor+ref", "actor_ref")], ids=["fused", "apart"]
)
def test_roles_in_one_process_learn_what_separate_ones_do(app, algorithm, placement, process):
    weights = {}
    for chosen in ("separate", placement):
        done = app(f"algorithm={algorithm}", f"placement={chosen}", f"trainer.run_name={chosen}", *PINNED)
        assert done.code == 0, done.err
        folder = done.folder.parent / chosen
        weights[chosen] = load_file(folder / "checkpoint" / "model.safetensors")
    name = process.format("critic_" if algorithm == "ppo" else "")
    assert len(processes_of(folder, name)) == 1
    assert not (folder / "logs" / "actor.log").exists()
    apart, together = weights.values()
    assert apart.keys() == together.keys()
    for key, value in apart.items():
        np.testing.assert_array_equal(together[key], value, err_msg=key)


@pytest.mark.parametrize(
    ("ranks", "other", "roles"),
    [
        pytest.param(
            ("model_engine=fsdp", "fsdp.world_size=2", "fsdp.device=cpu"),
            "separate",
            "actor_ref_rollout",
            marks=pytest.mark.nightly,
            id="fsdp",
        ),
        pytest.param(
            ("model_engine=megatron", "megatron.tensor_model_parallel_size=2", "algorithm=ppo"),
            "actor+ref+critic",
            "actor_ref_critic_rollout",
            marks=pytest.mark.nightly,
            id="megatron",
        ),
    ],
)
def test_ranks_with_a_rollout_in_each_process_learn_what_separate_rollouts_do(app, ranks, other, roles):
    """Each rank gathers the weights and sends them to the replica in its process."""
    weights = {}
    for chosen in (other, "fused"):
        more = (*PINNED, *ranks, "rollout.num_workers=2", "trainer.val_before_train=false")
        done = app(f"placement={chosen}", f"trainer.run_name={chosen}", *more)
        assert done.code == 0, done.err
        folder = done.folder.parent / chosen
        steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        trained = [step for step in steps if step["step"]]
        assert [step["weight_sync/version"] for step in trained] == [1, 2]
        assert [step["weight_sync/receivers"] for step in trained] == [2, 2]
        assert [step["training/off_policy/trajectory_staleness_worst/max"] for step in trained] == [0, 0]
        assert max(step["training/rollout_log_probs_diff_max"] for step in trained) < 1e-4
        weights[chosen] = load_file(folder / "checkpoint" / "model.safetensors")
    logs = {path.name for path in (folder / "logs").glob("*.log")}
    assert {f"{roles}.log", f"{roles}-1.log"} <= logs
    assert not any(name.startswith("rollout") for name in logs)
    apart, together = weights.values()
    assert apart.keys() == together.keys()
    for key, value in apart.items():
        np.testing.assert_array_equal(together[key], value, err_msg=key)


@pytest.mark.nightly
def test_the_reward_in_the_process_of_the_first_rank_learns_what_a_separate_one_does(app):
    ranks = ("model_engine=fsdp", "fsdp.world_size=2", "fsdp.device=cpu", "trainer.val_before_train=false")
    weights = {}
    for chosen in ("separate", "actor+ref+reward"):
        done = app(f"placement={chosen}", f"trainer.run_name={chosen}", *PINNED, *ranks)
        assert done.code == 0, done.err
        folder = done.folder.parent / chosen
        weights[chosen] = load_file(folder / "checkpoint" / "model.safetensors")
    logs = {path.stem for path in (folder / "logs").glob("*.log")}
    assert {"actor_ref_reward", "actor_ref-1", "rollout-0"} <= logs
    assert "reward" not in logs
    apart, together = weights.values()
    assert apart.keys() == together.keys()
    for key, value in apart.items():
        np.testing.assert_array_equal(together[key], value, err_msg=key)


@pytest.mark.slow
def test_the_rollout_in_the_actors_process_gets_every_version(app):
    done = app("placement=fused", "trainer.total_training_steps=3")
    assert done.code == 0, done.err
    steps = done.metrics[-3:]
    assert [step["weight_sync/version"] for step in steps] == [1, 2, 3]
    assert [step["weight_sync/receivers"] for step in steps] == [1, 1, 1]
    assert [step["training/off_policy/trajectory_staleness_worst/max"] for step in steps] == [0, 0, 0]
    assert max(step["training/rollout_log_probs_diff_max"] for step in steps) < 1e-4
