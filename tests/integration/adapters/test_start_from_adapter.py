"""Runs whose policy or critic starts from an adapter, and that write merged models."""

from __future__ import annotations

import json

import pytest
from written_adapters import write_adapter

ENGINES = {
    "torch": [],
    "fsdp": ["fsdp.world_size=2", "fsdp.device=cpu"],
    "megatron": ["megatron.world_size=2", "megatron.tensor_model_parallel_size=2"],
}


@pytest.fixture(scope="module")
def adapter(base_model, tmp_path_factory):
    """A DoRA adapter of the demo model that peft wrote, which changes its log-probs."""
    return write_adapter(base_model, tmp_path_factory.mktemp("adapter"), std=0.02, use_dora=True)


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param("torch", marks=pytest.mark.nightly),
        pytest.param("fsdp", marks=pytest.mark.nightly),
        pytest.param("megatron", marks=pytest.mark.slow),
    ],
)
def test_each_engine_continues_it_and_writes_a_merged_model(app, base_model, adapter, engine):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    more = ["lora.merge_on_save=true", "actor.optim.lr=1e-5", "trainer.total_training_steps=1"]
    done = app(f"model_engine={engine}", f"lora.adapter_path={adapter}", *ENGINES[engine], *more)
    assert done.code == 0, done.err
    # The rollout generates with the adapter from the first step: its log-probs are the trainer's.
    (trained,) = done.metrics[1:]
    assert trained["training/rollout_log_probs_diff_max"] < 1e-4
    assert json.loads((done.folder / "checkpoint" / "config.json").read_text())["model_type"] == "qwen2"
    assert not list((done.folder / "checkpoint").glob("adapter_*"))
    base = AutoModelForCausalLM.from_pretrained(base_model)
    before = PeftModel.from_pretrained(base, adapter).merge_and_unload().state_dict()
    first, after = (
        AutoModelForCausalLM.from_pretrained(p).state_dict() for p in (base_model, done.folder / "checkpoint")
    )
    assert after.keys() == before.keys()
    far = {name for name in first if (after[name] - first[name]).abs().max() > 1e-3}
    assert {name.split(".")[-2] for name in far} == {"q_proj", "down_proj"}
    # one step of 1e-5 moves the merged weights much less than the adapter had moved them
    assert max((after[name] - before[name]).abs().max() for name in far) < 1e-3


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ENGINES)
def test_the_critic_of_each_engine_starts_from_an_adapter_and_its_head(app, base_model, tmp_path, engine):
    import peft
    import torch
    from transformers import AutoModelForTokenClassification

    settings = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="TOKEN_CLS")
    value = peft.get_peft_model(AutoModelForTokenClassification.from_pretrained(base_model, num_labels=1), settings)
    for name, weight in value.named_parameters():
        if name.endswith("score.modules_to_save.default.bias"):
            torch.nn.init.constant_(weight, 100.0)  # far above the rest of a value
    value.save_pretrained(str(tmp_path / "value"))
    more = ["algorithm=ppo", f"critic.adapter_path={tmp_path / 'value'}", "trainer.total_training_steps=1"]
    done = app(f"model_engine={engine}", *ENGINES[engine], *more)
    assert done.code == 0, done.err
    assert done.metrics[-1]["critic/values/mean"] > 90  # a new head gives 0
