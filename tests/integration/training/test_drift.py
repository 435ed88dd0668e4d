"""A long run that learns nothing changes nothing."""

from __future__ import annotations

import pytest
import torch
from relative import apart
from safetensors.torch import load_file

STEPS = 50


@pytest.mark.slow
def test_nothing_drifts_in_fifty_steps_at_learning_rate_0(app, base_model):
    """Rollout and trainer agree as in the first step, and weights and validation stay the same."""
    done = app(
        "actor.optim.lr=0",
        "actor.use_kl_loss=true",
        "algorithm.old_log_prob=recompute",
        "rollout.top_p=0.9",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.test_freq={STEPS}",
    )
    assert done.code == 0, done.err
    steps = [row for row in done.metrics if "actor/grad_norm" in row]
    assert len(steps) == STEPS
    assert any(step["actor/grad_norm"] > 0 for step in steps)
    for step in steps:
        assert step["training/rollout_probs_diff_max"] < 1e-5
        assert apart([step["actor/ppo_kl"], step["actor/kl_loss"]], [0.0, 0.0], step["actor/entropy"]) < 1e-6
        assert step["actor/pg_clipfrac"] == 0
    scores = {name: [row[name] for row in done.metrics if name in row] for name in done.metrics[0] if "val-" in name}
    assert scores
    for values in scores.values():
        assert values == [values[0]] * 2
    before, after = (load_file(folder / "model.safetensors") for folder in (base_model, done.folder / "checkpoint"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
