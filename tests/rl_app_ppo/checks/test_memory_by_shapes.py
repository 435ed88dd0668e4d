"""The memory that `--plan` estimates, against what the product's classes take under FakeTensorMode.

Nothing has values there, so a model of 7 billion weights needs no memory, and `cuda` no GPU.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fake_memory import FakeMemory
from standin_device import HOST_WAITS
from transformers import Qwen2Config

from rl_app_ppo.checks.model_size import model_size
from rl_app_ppo.checks.role_memory import role_bytes
from rl_app_ppo.config.loading import load_config
from rl_protocol import BatchData, ragged
from rl_trainer.backends import torch_policy
from rl_trainer.backends.parallel_strategy import PlainStrategy
from rl_trainer.backends.torch_critic import TorchCriticBackend
from rl_trainer.backends.torch_policy import PolicyOptions, TorchPolicyBackend
from rl_trainer.config.backends import TorchConfig

ROWS, HALF = 8, 128
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def folder(tmp_path):
    """Makes a folder with the configuration of Qwen2.5-7B, with so many blocks."""

    def make(layers):
        Qwen2Config(
            vocab_size=152064,
            hidden_size=3584,
            intermediate_size=18944,
            num_hidden_layers=layers,
            num_attention_heads=28,
            num_key_value_heads=4,
            tie_word_embeddings=False,
            max_position_embeddings=32768,
            pad_token_id=0,
        ).save_pretrained(tmp_path)
        return tmp_path

    return make


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    tokens = [rng.integers(1, 1000, HALF).tolist() for _ in range(2 * ROWS)]
    ones = ragged([np.ones(HALF)] * ROWS, "float32")
    return BatchData(
        {
            "prompts": ragged(tokens[:ROWS], "int64"),
            "responses": ragged(tokens[ROWS:], "int64"),
            "response_mask": ragged([[True] * HALF] * ROWS, "bool"),
            **dict.fromkeys(("old_log_probs", "advantages", "ref_log_prob", "values", "returns"), ones),
        }
    )


def config_of():
    """One pass of at most 2,048 tokens per update, with bfloat16 copies of float32 weights."""
    passes = [
        f"{of}.{key}" for of in ("actor", "critic") for key in ("ppo_max_token_len=2048", "ppo_mini_batch_size=8")
    ]
    return load_config(["model_engine=torch", "algorithm=ppo", "torch.param_dtype=bfloat16", "rollout.n=1", *passes])


def built(role, path, config, device):
    """The role's model as the worker builds it; the device is the only changed argument."""
    strategy = PlainStrategy(config.engine_as(TorchConfig), device)
    if role == "critic":
        return TorchCriticBackend(path, config.critic, rollout_n=1, seed=0, strategy=strategy)
    return TorchPolicyBackend(
        path, config.actor, rollout_n=1, strategy=strategy, options=PolicyOptions(frozen=role == "ref")
    )


def forward(role, model, batch):
    """What a pass computes for the batch."""
    if role == "critic":
        return model._model(model._tokens(batch))
    return model._columns(model._tokens(batch), 1.0, squares=False)


def use(role, model, batch):
    """Two updates, or a pass of a reference."""
    if role == "ref":
        with torch.no_grad():
            forward(role, model, batch)
        return
    update = (lambda: model.update(batch)) if role == "critic" else (lambda: model.update(batch, temperature=1.0))
    for _ in range(2):
        update()


@pytest.mark.parametrize("layers", [2, pytest.param(28, marks=pytest.mark.slow)], ids=["2 blocks", "7B"])
@pytest.mark.parametrize("role", ["actor", "critic", "ref"])
def test_the_estimate_is_within_10_percent_of_the_bytes_of_all_tensors(folder, batch, role, layers):
    path, config = folder(layers), config_of()
    with FakeMemory() as memory:
        model = built(role, path, config, CPU)
        use(role, model, batch)
    parts = role_bytes(role, config, model_size(path, config.lora), on_gpu=True)
    assert sum(parts.values()) == pytest.approx(memory.peak, rel=0.10), parts
    assert memory.reads <= HOST_WAITS.keys()
    assert (role == "ref") == (not memory.reads)


@pytest.mark.parametrize("role", ["actor", "critic", "ref"])
def test_a_forward_pass_is_on_the_gpu_alone(folder, batch, role):
    path, config = folder(2), config_of()
    with FakeMemory() as memory, torch.no_grad():
        model = built(role, path, config, CUDA)
        assert forward(role, model, batch).device.type == "cuda"
        assert {tensor.device.type for tensor in model._model.state_dict().values()} == {"cuda"}
    assert memory.reads == set(), "the host waits for nothing"


def test_a_tensor_left_on_the_cpu_is_an_error(folder, batch, monkeypatch):
    path, config = folder(2), config_of()
    with FakeMemory(), torch.no_grad():
        model = built("actor", path, config, CUDA)
        there = torch_policy.token_batch
        monkeypatch.setattr(torch_policy, "token_batch", lambda *args, **more: there(*args, **{**more, "device": CPU}))
        with pytest.raises(RuntimeError, match=r"cuda.*cpu"):
            forward("actor", model, batch)
