"""A tiny Qwen3-MoE trains with the experts of its rollout, or of the pass before the update."""

from __future__ import annotations

import pytest

REWARD = "def score(data_source, solution_str, ground_truth, extra_info=None):\n    return float(sum(letter in '02468' for letter in solution_str))\n"
ENGINES = {
    "torch": [],
    "megatron": ["model_engine=megatron", "megatron.expert_model_parallel_size=2", "megatron.world_size=2"],
    "fsdp": ["model_engine=fsdp", "fsdp.world_size=2", "fsdp.device=cpu", "fsdp.activation_checkpointing=true"],
}


def run(app, moe_model, folder, *settings):
    """The metrics of two steps, of which the second samples with moved routers."""
    reward = folder / "evens.py"
    reward.write_text(REWARD)
    done = app(
        f"model.path={moe_model}",
        f"reward.function={reward}:score",
        "--trust",
        str(reward),
        "actor.optim.lr=1e-2",
        "actor.optim.lr_warmup_steps=0",
        "algorithm.old_log_prob=recompute",
        "trainer.total_training_steps=2",
        *settings,
    )
    assert done.code == 0, done.err
    steps = [row for row in done.metrics if "actor/grad_norm" in row]
    assert len(steps) == 2
    return steps


@pytest.mark.parametrize(
    ("replay", "engine"),
    [
        pytest.param("R3", "fsdp", marks=pytest.mark.slow),
        pytest.param("R2", "torch", marks=pytest.mark.nightly),
        pytest.param("R2", "megatron", marks=pytest.mark.nightly),
    ],
)
def test_a_run_replays_experts(app, moe_model, tmp_path, replay, engine):
    """At the first optimizer step of each pass the policy is the old one, so the ratios are 1."""
    steps = run(app, moe_model, tmp_path, f"algorithm.router_replay={replay}", *ENGINES[engine])
    for step in steps:
        assert step["training/rollout_probs_diff_max"] < 1e-4
        assert step["actor/grad_norm"] > 0
