"""A policy with experts, a tiny Qwen3-MoE, trains in the application."""

from __future__ import annotations

import json

import pytest

ENGINES = {
    "torch": [],
    "fsdp": ["fsdp.world_size=2", "fsdp.device=cpu"],
    "megatron": ["megatron.expert_model_parallel_size=2"],
}


@pytest.fixture
def trained(app, moe_model, tmp_path):
    """Train the model for three steps, with more settings; return the finished run."""

    def run(*more):
        reward = tmp_path / "evens.py"  # tells responses of an untrained model apart
        body = "return float(sum(letter in '02468' for letter in solution_str))"
        reward.write_text(f"def score(data_source, solution_str, ground_truth, extra_info=None):\n    {body}\n")
        done = app(
            f"model.path={moe_model}",
            f"reward.function={reward}:score",
            *("--trust", str(reward)),
            "actor.optim.lr=1e-2",
            "actor.optim.lr_warmup_steps=0",
            "trainer.total_training_steps=3",
            *more,
        )
        assert done.code == 0, done.err
        steps = [row for row in done.metrics if "actor/grad_norm" in row]
        assert len(steps) == 3
        assert all(step["training/rollout_probs_diff_max"] < 1e-4 for step in steps)
        return done

    return run


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_all_experts_are_trained_and_reach_rollout_and_checkpoint(trained, moe_model, engine):
    from safetensors.torch import load_file

    done = trained(f"model_engine={engine}", *ENGINES[engine])
    assert json.loads((done.folder / "checkpoint" / "config.json").read_text())["model_type"] == "qwen3_moe"
    before, after = (load_file(folder / "model.safetensors") for folder in (moe_model, done.folder / "checkpoint"))
    assert before.keys() == after.keys()
    experts = [name for name in before if ".experts." in name]
    assert len(experts) == 2 * 4 * 3
    assert all((after[name] - before[name]).abs().max() > 1e-4 for name in [*experts, *_routers(before)])


def _routers(weights):
    return [name for name in weights if name.endswith("mlp.gate.weight")]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "fsdp"])
def test_adapters_of_experts_are_trained_and_saved_as_peft_reads_them(trained, moe_model, engine):
    import peft
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    done = trained(f"model_engine={engine}", *ENGINES[engine], "lora.rank=4")
    saved = load_file(done.folder / "checkpoint" / "adapter_model.safetensors")
    experts = [name for name in saved if ".experts." in name and "lora_B" in name]
    assert len(experts) == 2 * 2
    assert all(saved[name].abs().max() > 1e-4 for name in experts)
    adapted = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(moe_model), done.folder / "checkpoint"
    )
    assert all(adapted.state_dict()[name.replace(".weight", ".default.weight")].equal(saved[name]) for name in experts)
