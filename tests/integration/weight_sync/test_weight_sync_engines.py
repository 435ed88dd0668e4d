"""Point-to-point and group engines in the real app.

Versions increase, all replicas get them, and they generate with the weights that were trained.
"""

from __future__ import annotations

import shutil

import pytest

PARAMETERS = 333_184
FULL = 4 * PARAMETERS
"""Bytes of all tensors of the demo model in float32."""


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["tcp", "gloo", "ray"])
def test_an_engine_carries_the_weights_of_a_run(app, engine):
    done = app(
        f"checkpoint_engine.backend={engine}",
        "trainer.total_training_steps=3",
        "actor.optim.lr=1e-3",
        "rollout.num_workers=2",
    )
    assert done.code == 0, done.err
    trained = done.metrics[1:]
    assert [m["weight_sync/version"] for m in trained] == [1, 2, 3]
    assert [(m["weight_sync/receivers"], m["weight_sync/quarantined"]) for m in trained] == [(2, 0)] * 3
    assert [m["training/off_policy/trajectory_staleness_worst/max"] for m in trained] == [0, 0, 0]
    assert all(m["weight_sync/bytes"] == FULL for m in trained)
    assert all(m["weight_sync/receive_seconds"] > 0 for m in trained)
    prefetched = [m["weight_sync/prefetched_bytes"] > 0 for m in trained]
    assert prefetched == ([False, True, True] if engine == "tcp" else [False] * 3)
    # Steps 2 and 3 generate with trained weights, so a failed sync would give other log-probs.
    assert max(m["training/rollout_log_probs_diff_max"] for m in trained) < 1e-4
    assert any(m["actor/grad_norm"] > 0 for m in trained[:2])
    assert max(m["perf/driver_bytes"] for m in trained) < 256 * 1024
    assert engine in done.out


@pytest.mark.slow
def test_changes_alone_carry_a_run_in_bfloat16(app):
    """The trainer keeps float32, so a small step changes few weights after rounding to bfloat16."""
    done = app(
        "checkpoint_engine.backend=delta-shm",
        "rollout.dtype=bfloat16",
        "actor.optim.lr=1e-6",
        "trainer.total_training_steps=3",
    )
    assert done.code == 0, done.err
    first, *later = done.metrics[1:]
    assert [m["weight_sync/version"] for m in (first, *later)] == [1, 2, 3]
    assert first["weight_sync/changed_share"] == 1
    assert first["weight_sync/delta_bytes"] == first["weight_sync/bytes"] == 2 * PARAMETERS
    for step in later:
        assert 0 < step["weight_sync/changed_share"] < 0.2
        gaps_and_values = step["weight_sync/changed_share"] * PARAMETERS * 4
        assert step["weight_sync/delta_bytes"] <= 1.2 * gaps_and_values
        # The rounding error of bfloat16 in a log-prob: larger than that of float32, smaller than
        # the difference to another policy.
        assert 1e-4 < step["training/rollout_log_probs_diff_max"] < 0.5


@pytest.fixture
def wide_model(base_model, tmp_path):
    """A model of the demo's vocabulary that is large enough to be relayed."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path / "wide"
    shutil.copytree(base_model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    wide = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 5, "num_attention_heads": 8}
    config = AutoConfig.from_pretrained(base_model, **wide, num_key_value_heads=8, layer_types=["full_attention"] * 5)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.nightly
def test_one_replica_of_a_host_relays_the_weights_of_a_run_to_the_others(app, wide_model):
    done = app(
        "checkpoint_engine.backend=tcp",
        f"model.path={wide_model}",
        "actor.optim.lr=1e-3",
        "actor.entropy_coeff=0.01",  # a gradient without a reward: the model is untrained
        "rollout.num_workers=3",
        "trainer.total_training_steps=3",
        "trainer.val_before_train=false",
        "trainer.test_freq=0",
    )
    assert done.code == 0, done.err
    trained = [m for m in done.metrics if m["step"]]
    assert min(m["weight_sync/bytes"] for m in trained) > 64 << 20
    assert [m["weight_sync/relayed"] for m in trained] == [0, 2, 2]
    # all three replicas generate with the trained weights
    assert max(m["training/rollout_log_probs_diff_max"] for m in trained) < 1e-4
    assert all(m["actor/grad_norm"] > 0 for m in trained)
