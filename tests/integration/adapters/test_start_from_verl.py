"""Runs that start from an adapter of two tensor and two pipeline ranks in verl's old format."""

from __future__ import annotations

import pytest
from relative import apart
from verl_adapters import legacy_files

from rl_megatron_peft import ModelShape

ENGINES = {
    "torch": [],
    "fsdp": ["fsdp.world_size=2", "fsdp.device=cpu"],
    "megatron": ["megatron.world_size=2", "megatron.pipeline_model_parallel_size=2"],
}


@pytest.fixture(scope="module")
def old(base_model, tmp_path_factory):
    """Changes the model's log-probs."""
    folder = tmp_path_factory.mktemp("verl")
    return legacy_files(folder, ModelShape.read(base_model), tensor=2, pipeline=2, std=0.1)


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param("torch", marks=pytest.mark.slow),
        pytest.param("fsdp", marks=pytest.mark.nightly),
        pytest.param("megatron", marks=pytest.mark.nightly),
    ],
)
def test_each_engine_starts_from_what_peft_computes_with_it_and_resumes(app, base_model, old, engine):
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    words = [f"model_engine={engine}", *ENGINES[engine], f"lora.adapter_path={old}", "lora.alpha=6"]
    words += ["trainer.save_freq=1", "actor.use_kl_loss=true", "trainer.resume_mode=auto", "actor.optim.lr=1e-6"]
    done = app(*words, "trainer.total_training_steps=1", "lora.merge_on_save=true")
    assert done.code == 0, done.err
    assert str(done.folder / "adapter") in done.out
    (trained,) = done.metrics[1:]
    assert trained["training/rollout_log_probs_diff_max"] < 1e-4  # the rollout generates with it
    assert trained["actor/ref_kl"] > 1e-2  # the reference is the base
    base = AutoModelForCausalLM.from_pretrained(base_model)
    first = PeftModel.from_pretrained(base, done.folder / "adapter").eval()
    now = AutoModelForCausalLM.from_pretrained(done.folder / "checkpoint").eval()
    ids = torch.arange(10)[None]
    with torch.no_grad():
        expected, got = first(ids).logits, now(ids).logits
        with first.disable_adapter():
            plain = first(ids).logits
    assert apart(got, expected) < 1e-3  # one step of 1e-6 from it
    assert apart(plain, expected) > 1e-2
    again = app(*words, "trainer.total_training_steps=2")
    assert again.code == 0, again.err
    assert [line["step"] for line in again.metrics][-1] == 2
    assert "converted" not in again.out
