"""A policy with experts, a tiny Qwen3-MoE, trains in the application."""

from __future__ import annotations

import json

import pytest
from relative import apart

ENGINES = {
    "torch": [],
    "fsdp": ["fsdp.world_size=2", "fsdp.device=cpu"],
    "megatron": ["megatron.expert_model_parallel_size=2"],
}


def engines(*of_ci):
    """A parameter for each engine, which is run by CI or in the nightly suite."""
    return [
        pytest.param(engine, marks=pytest.mark.slow if engine in of_ci else pytest.mark.nightly) for engine in ENGINES
    ]


@pytest.fixture
def trained(app, moe_model, tmp_path):
    """Train the model for three steps, with more settings; return the finished run."""

    def run(*more, lr=1e-2):
        reward = tmp_path / "evens.py"  # tells responses of an untrained model apart
        body = "return float(sum(letter in '02468' for letter in solution_str))"
        reward.write_text(f"def score(data_source, solution_str, ground_truth, extra_info=None):\n    {body}\n")
        done = app(
            f"model.path={moe_model}",
            f"reward.function={reward}:score",
            *("--trust", str(reward)),
            f"actor.optim.lr={lr}",
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


@pytest.mark.parametrize("engine", engines("torch", "megatron"))
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


@pytest.mark.parametrize("engine", engines("fsdp"))
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


@pytest.mark.parametrize("engine", engines("megatron"))
def test_training_starts_from_adapters_of_experts_that_peft_has_saved(trained, moe_model, tmp_path, engine):
    """Steps that change nothing write the adapter that they started from."""
    import peft
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    settings = peft.LoraConfig(r=2, lora_alpha=6, use_rslora=True, target_modules=["q_proj"], target_parameters=experts)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(moe_model), settings)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    model.save_pretrained(str(tmp_path / "start"))
    lora = f"lora.adapter_path={tmp_path / 'start'}"
    done = trained(f"model_engine={engine}", *ENGINES[engine], lora, lr=1e-12)
    first, saved = (
        load_file(one / "adapter_model.safetensors") for one in (tmp_path / "start", done.folder / "checkpoint")
    )
    assert first.keys() == saved.keys()
    assert all(apart(saved[name], first[name]) < 1e-6 for name in first)
