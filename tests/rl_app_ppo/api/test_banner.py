"""The banner shows the resolved preset, task, workers, engine, device and adapter."""

from __future__ import annotations

import pytest

from rl_app_ppo.api.banner import described
from rl_app_ppo.config.loading import load_config
from rl_app_ppo.config.presets import presets

DATA = ("data.train_files=a.jsonl", "data.val_files=b.jsonl", "model.path=/models/m")


def test_the_banner_of_the_demo_says_preset_task_and_how_answers_are_written():
    said = described(load_config())
    assert said["preset"] == f"demo: {presets()['demo']}"
    assert said["task"].startswith("two-digit addition (37+45= is answered by 82), ")
    units_first = described(load_config(["data.demo=addition"]))["task"]
    assert "answers written units first (37+45= is answered by 280, that is 082)" in units_first
    assert said["actor"] == "lr 0.0004, warm-up of 16 updates, mini-batches of 16 prompts, clip 0.2 / 0.28"
    assert said["trained"] == "all weights, by torch on cpu in float32"
    assert "at most 4 tokens per response" in said["rollout"]
    assert (
        said["workers"]
        == "1 rollout, reward, actor, reference; placement fused (in one process: actor+ref+rollout); Ray (local)"
    )
    assert said["data plane"] == "rl-transferqueue, 2 storage units, shared memory"
    assert said["old log-probs"] == "those of the rollout engine where they agree within 0.001 nats, else recomputed"
    assert "critic" not in said
    assert "calculator" in described(load_config(["preset=demo-calculator"]))["task"]


def test_one_of_anything_has_no_plural():
    one = ["data.train_batch_size=1", "actor.ppo_mini_batch_size=1", "rollout.n=2", "trainer.total_training_steps=1"]
    said = described(load_config([*one, "transfer_queue.num_storage_units=1", "actor.optim.lr_warmup_steps=1"]))
    assert said["step"] == "1 prompt x 2 responses = 2, 1 step"
    assert said["actor"].startswith("lr 0.0004, warm-up of 1 update, mini-batches of 1 prompt, ")
    assert said["data plane"] == "rl-transferqueue, 1 storage unit, shared memory"


@pytest.mark.parametrize(
    ("overrides", "workers"),
    [
        (["actor.use_kl_loss=false"], "1 rollout, reward, actor; "),
        (["lora.rank=8"], "1 rollout, reward, actor, reference (the actor without its adapter); "),
        (["algorithm=ppo"], "1 rollout, reward, actor, reference, critic; "),
        (["algorithm=ppo", *DATA], "1 rollout, reward, actor, critic; "),
        (["model_engine=fsdp", "fsdp.world_size=2"], "2 rollout, reward, actor x 2, reference x 2; "),
    ],
)
def test_the_banner_names_the_workers_there_are(overrides, workers):
    assert described(load_config(overrides))["workers"].startswith(f"{workers}placement ")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["algorithm.old_log_prob=recompute"], "recomputed in every step"),
        (["algorithm.old_log_prob=rollout"], "those of the rollout engine"),
        (
            ["algorithm.old_log_prob=interpolate", "async_rl.max_staleness=2"],
            "between those of the rollout engine and of the trained policy, by the age of the token's weights",
        ),
        (
            ["algorithm.rollout_correction.rollout_is=token"],
            "recomputed in every step, since algorithm.rollout_correction.rollout_is compares them with those of the rollout engine",
        ),
    ],
)
def test_the_banner_says_where_old_log_probs_come_from(overrides, said):
    assert described(load_config(overrides))["old log-probs"] == said


def test_the_banner_names_engine_device_adapter_and_dtype():
    fsdp = load_config(["model_engine=fsdp", "fsdp.device=cpu", "fsdp.param_dtype=bfloat16", "lora.rank=8", *DATA])
    said = described(fsdp)
    assert said["trained"] == f"LoRA of rank 8, alpha {fsdp.lora.alpha:g}, on all-linear, by fsdp on cpu in bfloat16"
    assert said["preset"] == "none: the defaults of the algorithm"
    assert said["task"] == "a.jsonl, validated with b.jsonl, prompts of at most 512 tokens"
    assert said["model"] == "/models/m"
    assert "OFF" in described(load_config(["checkpoint_engine.enabled=false"]))["weights"]
