"""The estimate for a model of 7 billion weights, against a training step on fake tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fake_gpu import GPU, FakeGpu
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config

from rl_app_ppo.checks.model_size import model_size
from rl_app_ppo.checks.role_memory import ModelSize, role_bytes
from rl_app_ppo.config.loading import load_config
from rl_protocol import BatchData, ragged
from rl_trainer.backends import parallel_strategy
from rl_trainer.backends.packing import PACKED_ATTENTION, register_packed_attention
from rl_trainer.backends.parallel_strategy import PlainStrategy
from rl_trainer.backends.torch_critic import TorchCriticBackend
from rl_trainer.backends.torch_policy import TorchPolicyBackend
from rl_trainer.config.backends import TorchConfig

ROWS, SIDE = 4, 256
"""Sequences of the micro batch, and tokens of each prompt and of each response."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Configuration of Qwen2.5-7B; the model is made on `meta` where the product would read it."""
    Qwen2Config(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        tie_word_embeddings=False,
        pad_token_id=0,
    ).save_pretrained(tmp_path)

    def load(path, *, packed, dtype):
        assert packed
        assert dtype == torch.float32
        register_packed_attention()
        with torch.device("meta"):
            config = AutoConfig.from_pretrained(path)
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=PACKED_ATTENTION)
        return model.eval()

    monkeypatch.setattr(parallel_strategy, "load_model", load)
    return tmp_path


def micro_batch():
    rng = np.random.default_rng(0)
    prompts, responses = (rng.integers(1, 32000, (ROWS, SIDE)).tolist() for _ in range(2))
    numbers = ragged(np.ones((ROWS, SIDE)).tolist(), "float32")
    return BatchData(
        {
            "prompts": ragged(prompts, "int64"),
            "responses": ragged(responses, "int64"),
            "response_mask": ragged([[True] * SIDE] * ROWS, "bool"),
            **dict.fromkeys(("old_log_probs", "advantages", "ref_log_prob", "values", "returns"), numbers),
        }
    )


@pytest.mark.parametrize(
    ("role", "settings"),
    [
        ("actor", []),
        ("actor", ["torch.activation_checkpointing=true"]),
        ("actor", ["lora.rank=16"]),
        ("critic", []),
        ("critic", ["torch.activation_checkpointing=true"]),
    ],
    ids=["full", "recomputed", "lora", "critic", "recomputed critic"],
)
def test_the_estimate_of_7b_is_within_10_percent_of_the_bytes_of_a_step(folder, role, settings):
    both = "{ppo_max_token_len: 2048, ppo_mini_batch_size: 2, use_remove_padding: true}"
    engine = ["model_engine=torch", "torch.param_dtype=bfloat16", "rollout.n=2", "data.train_batch_size=2"]
    config = load_config([*engine, "algorithm=ppo", f"actor={both}", f"critic={both}", *settings])
    strategy = PlainStrategy(config.engine_as(TorchConfig), GPU)
    with FakeGpu() as gpu:
        if role == "actor":
            model = TorchPolicyBackend(folder, config.actor, lora=config.lora, rollout_n=2, strategy=strategy)
            model.update(micro_batch(), temperature=1.0)
        else:
            model = TorchCriticBackend(folder, config.critic, rollout_n=2, seed=0, strategy=strategy)
            model.update(micro_batch())
        lasting, (at_backward,) = gpu.held, gpu.at_backward
    size = model_size(folder, config.lora)
    estimate = role_bytes(role, config, size, on_gpu=True)
    later = size.activations(2048, 2) // size.layers if config.engine_as(TorchConfig).activation_checkpointing else 0
    weights, trained = estimate["weights"], estimate["gradients"] + estimate["optimizer"]
    assert weights + trained == pytest.approx(lasting, rel=0.01)
    assert trained == pytest.approx(lasting - weights, rel=0.1)
    passing = at_backward - weights  # the first backward pass: no moments, no gradients, no layer computed again
    # there are no logits then: a chunk of them was computed, and will be again
    assert passing == pytest.approx(estimate["activations"] - later, abs=0.1 * estimate["activations"])


def size_of(*, trained, outside, vocabulary):
    """10 million weights in 3 layers."""
    return ModelSize(
        weights=10_000_000,
        trained=trained,
        kv_token=1,
        layers=3,
        outside=outside,
        blocks=10_000_000 - outside,
        head=0,
        hidden=1,
        vocabulary=vocabulary,
        chunked=True,
        activations=lambda tokens, element: 600 * tokens * element,
    )


@pytest.mark.parametrize(
    ("outside", "tokens", "parts"),
    [
        (7_000_000, 16, {"gathered weights": 2 * 2 * 7_000_000}),
        (1_000_000, 4000, {"gathered weights": 2 * (1_000_000 + 2 * 3_000_000), "activations": 600 * 4000 * 2 // 3}),
        (7_000_000, 4000, {"gathered weights": 2 * 7_000_000, "logits": 4 * 4 * 4000 * 1000}),
    ],
    ids=["gathered", "block", "logits"],
)
def test_a_reference_holds_what_the_largest_part_of_a_pass_takes(outside, tokens, parts):
    """10 million weights in bfloat16: those outside, and 3 blocks of a third of the others."""
    size = size_of(trained=10_000_000, outside=outside, vocabulary=8 if outside == 1_000_000 else 1000)
    engine = ["model_engine=fsdp", "fsdp.device=cpu", "fsdp.param_dtype=bfloat16"]
    config = load_config([*engine, f"actor.ppo_max_token_len={tokens}", "actor.use_kl_loss=true"])
    expected = {"weights": 2 * 10_000_000, **parts}
    assert dict(role_bytes("ref", config, size)) == expected | {"allocator": 40 << 20}
    assert dict(role_bytes("ref", config, size, on_gpu=True)) == expected


@pytest.mark.parametrize(
    ("settings", "gradients"),
    [([], 4 * 10_000_000), (["torch.param_dtype=bfloat16"], 2 * 2 * 1_000_000), (["lora.rank=1"], 4 * 50_000)],
    ids=["float32", "bfloat16", "adapters"],
)
def test_what_the_allocator_of_the_cpu_keeps_between_updates(settings, gradients):
    """Freed gradients, and with bfloat16 copies those of two embeddings of a million weights; those
    of the activations of one of 3 layers; and 80 MiB of kernels."""
    trained = 50_000 if "lora.rank=1" in settings else 10_000_000
    size = size_of(trained=trained, outside=1_000_000, vocabulary=8)
    config = load_config(["model_engine=torch", "actor.ppo_max_token_len=16", *settings])
    layer = 600 * 16 * (2 if "torch.param_dtype=bfloat16" in settings else 4) // 3
    assert role_bytes("actor", config, size)["allocator"] == gradients + layer + (80 << 20)


@pytest.mark.parametrize(("placement", "base"), [("fused", 0), ("separate", 4 * 10_000_000)])
def test_a_critic_with_adapters_has_no_base_in_the_process_of_the_actor(placement, base):
    config = load_config(["algorithm=ppo", "lora.rank=1", "critic.use_lora=true", f"placement={placement}"])
    size = size_of(trained=50_000, outside=1_000_000, vocabulary=8)
    assert role_bytes("critic", config, size)["weights"] == base + 4 * 50_000
    assert role_bytes("actor", config, size)["weights"] == 4 * 10_000_000 + 4 * 50_000


def test_logits_of_all_tokens_of_a_pass_of_megatron_are_counted():
    """`log_probs` of its backend computes them at once; that of the other engines in chunks."""
    size = size_of(trained=10_000_000, outside=7_000_000, vocabulary=151936)

    def logits(engine):
        config = load_config([f"model_engine={engine}", "actor.ppo_max_token_len=4096"])
        return role_bytes("actor", config, size, on_gpu=True)["logits"]

    assert (logits("megatron"), logits("torch")) == (4 * 4 * 4096 * 151936, 3 * (64 << 20))
