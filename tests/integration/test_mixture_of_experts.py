"""A policy with experts, a tiny Qwen3-MoE, trains in the application."""

from __future__ import annotations

import json

import pytest

ENGINES = {"torch": [], "fsdp": ["fsdp.world_size=2", "fsdp.device=cpu"]}


def _reward(folder):
    """A reward function that tells responses of an untrained model apart."""
    path = folder / "evens.py"
    body = "return float(sum(letter in '02468' for letter in solution_str))"
    path.write_text(f"def score(data_source, solution_str, ground_truth, extra_info=None):\n    {body}\n")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_all_experts_are_trained_and_reach_rollout_and_checkpoint(app, moe_model, tmp_path, engine):
    from safetensors.torch import load_file

    reward = _reward(tmp_path)
    done = app(
        f"model.path={moe_model}",
        f"model_engine={engine}",
        *ENGINES[engine],
        f"reward.function={reward}:score",
        "--trust",
        str(reward),
        "actor.optim.lr=1e-2",
        "actor.optim.lr_warmup_steps=0",
        "trainer.total_training_steps=3",
    )
    assert done.code == 0, done.err
    steps = [row for row in done.metrics if "actor/grad_norm" in row]
    assert len(steps) == 3
    assert all(step["training/rollout_probs_diff_max"] < 1e-4 for step in steps)
    assert json.loads((done.folder / "checkpoint" / "config.json").read_text())["model_type"] == "qwen3_moe"
    before, after = (load_file(folder / "model.safetensors") for folder in (moe_model, done.folder / "checkpoint"))
    assert before.keys() == after.keys()
    experts = [name for name in before if ".experts." in name]
    assert len(experts) == 2 * 4 * 3
    assert all((after[name] - before[name]).abs().max() > 1e-4 for name in [*experts, *_routers(before)])


def _routers(weights):
    return [name for name in weights if name.endswith("mlp.gate.weight")]


@pytest.mark.slow
def test_adapters_of_experts_are_refused_and_those_of_the_attention_train(app, moe_model, tmp_path):
    reward = _reward(tmp_path)
    given = (f"model.path={moe_model}", f"reward.function={reward}:score", "--trust", str(reward), "lora.rank=4")
    refused = app(*given)
    assert refused.code == 2
    assert "gate_proj, up_proj, down_proj, of experts, which get no adapters" in refused.err
    done = app(*given, "lora.target_modules=[q_proj,k_proj,v_proj,o_proj]")
    assert done.code == 0, done.err
    assert all(row["training/rollout_probs_diff_max"] < 1e-4 for row in done.metrics if "actor/grad_norm" in row)
