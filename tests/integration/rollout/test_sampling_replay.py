"""Runs that sample from a part of the tokens, with engines whose models are on several ranks."""

from __future__ import annotations

import pytest

FSDP = ("model_engine=fsdp", "fsdp.world_size=2", "fsdp.device=cpu", "actor.use_remove_padding=false")
MEGATRON = ("model_engine=megatron", "megatron.tensor_model_parallel_size=2")


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(FSDP, marks=pytest.mark.nightly, id="fsdp"),
        pytest.param(MEGATRON, marks=pytest.mark.slow, id="megatron"),
    ],
)
def test_the_trainer_computes_the_log_probs_that_were_sampled_with(app, engine):
    """Of the policy in each step, and of the reference in the first one, where it is the policy."""
    done = app(
        *engine,
        "rollout.top_p=0.7",
        "rollout.top_k=9",
        "rollout.temperature=0.8",
        "algorithm.old_log_prob=recompute",
        "actor.use_kl_loss=true",
        "actor.optim.lr=1e-3",
        "actor.optim.lr_warmup_steps=0",
        "actor.entropy_coeff=0.1",
        "trainer.total_training_steps=2",
    )
    assert done.code == 0, done.err
    steps = done.metrics[1:]
    assert len(steps) == 2
    for step in steps:
        assert step["training/rollout_probs_diff_max"] < 1e-4
    assert steps[0]["actor/kl_loss"] < 1e-3 * steps[1]["actor/kl_loss"]
