"""Models on a GPU of fake tensors: every tensor is where it must be, as on a real GPU."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
import torch
from fake_gpu import GPU, FakeGpu
from safetensors import safe_open
from torch._subclasses.fake_tensor import FakeTensor
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from rl_protocol import BatchData, RaggedColumn
from rl_protocol.ports import GenerationRequest, SamplingParams
from rl_trainer.backends.parallel_strategy import PlainStrategy
from rl_trainer.backends.reward_model import RewardModelScorer
from rl_trainer.backends.snapshot import PLACES
from rl_trainer.backends.torch_critic import TorchCriticBackend
from rl_trainer.backends.torch_policy import PolicyOptions, TorchPolicyBackend
from rl_trainer.backends.world import CPU, device_of
from rl_trainer.config import ActorConfig, CriticConfig, OptimConfig, RolloutCorrectionConfig
from rl_trainer.config.backends import TorchConfig
from rl_trainer.config.lora import LoraConfig
from rl_trainer.rewards import Sample
from rl_trainer.rewards.scorer_toml import RewardModelConfig
from rl_trainer.rollout.hf_engine import HFRolloutEngine

OPTIM = OptimConfig(lr=1e-2)
ADAPTERS = [None, LoraConfig(rank=2), LoraConfig(rank=2, dropout=0.5, use_dora=True)]
NAMES = ["full", "lora", "dora"]


@pytest.fixture(scope="module")
def data(model_path, training_batch):
    batch = training_batch(TorchPolicyBackend(model_path, None))
    offsets, rng = batch.ragged("responses").offsets, np.random.default_rng(1)
    more = {name: rng.normal(size=offsets[-1]).astype(np.float32) for name in ("values", "returns")}
    return BatchData({**batch.columns, **{name: RaggedColumn(x, offsets, "float32") for name, x in more.items()}})


def chosen(monkeypatch):
    """The device that the product chooses where torch finds a GPU."""
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: True)
        return device_of("auto")


def policy_on(device, path, *, lora=None, packed=True, dtype="float32", options=None, **settings):
    config = ActorConfig(optim=OPTIM, ppo_mini_batch_size=4, use_remove_padding=packed, **settings)
    strategy = PlainStrategy(TorchConfig(param_dtype=dtype), device)
    return TorchPolicyBackend(path, config, lora=lora, strategy=strategy, options=options or PolicyOptions())


def critic_on(device, path, *, lora=None):
    config = CriticConfig(optim=OPTIM, ppo_mini_batch_size=4, use_remove_padding=True)
    strategy = PlainStrategy(TorchConfig(), device)
    return TorchCriticBackend(path, config, lora=lora, rollout_n=1, seed=0, strategy=strategy)


def saved(backend, folder):
    """Tensor -> its shape, element type and place in the snapshot of a backend."""
    folder.mkdir()
    data, _ = backend.snapshot()(folder)
    with safe_open(data, framework="pt") as file:
        places = json.loads(file.metadata()[PLACES])
        return {name: (place, file.get_tensor(name).dtype) for name, place in places.items()}


def shapes(columns):
    return {name: (column.dtype, column.values.shape) for name, column in columns.columns.items()}


@pytest.mark.parametrize(("dtype", "packed"), [("float32", False), ("bfloat16", True)], ids=["padded", "packed bf16"])
@pytest.mark.parametrize("lora", ADAPTERS, ids=NAMES)
def test_a_policy_is_on_the_gpu_with_all_that_it_computes(model_path, data, tmp_path, monkeypatch, lora, dtype, packed):
    correction = RolloutCorrectionConfig(rollout_is="token", rollout_rs=("token_k1",), rollout_rs_threshold=("0.1_8",))
    options = PolicyOptions(sum_pi_squared=True, correction=correction, top=3)

    def trained(device):
        policy = policy_on(device, model_path, lora=lora, packed=packed, dtype=dtype, options=options, use_kl_loss=True)
        found = [shapes(policy.compute_log_probs(data, temperature=0.9))]
        if lora is not None:
            found.append(shapes(policy.compute_reference_log_probs(data, temperature=0.9)))
            found += [(w.name, w.dtype, w.shape) for w in policy.adapter_weights()]
        found.append(policy.update(data, temperature=0.9).keys())
        found += [(w.name, w.dtype, w.shape) for w in policy.named_weights()]
        found.append(saved(policy, tmp_path / device.type))
        policy.restore(tmp_path / device.type)
        return policy, found

    _, wanted = trained(CPU)
    with FakeGpu():
        policy, found = trained(chosen(monkeypatch))
        assert found == wanted
        model, optimizer = policy._model, policy._optimizer
        tensors = [*model.parameters(), *model.buffers(), *optimizer.moments().values()]
        assert {tensor.device for tensor in tensors} == {GPU}


@pytest.mark.parametrize("lora", ADAPTERS, ids=NAMES)
def test_a_critic_is_on_the_gpu_with_all_that_it_computes(model_path, data, tmp_path, monkeypatch, lora):
    def trained(device):
        critic = critic_on(device, model_path, lora=lora)
        found = [shapes(critic.compute_values(data)), critic.update(data).keys(), saved(critic, tmp_path / device.type)]
        critic.restore(tmp_path / device.type)
        return critic, found

    _, wanted = trained(CPU)
    with FakeGpu():
        critic, found = trained(chosen(monkeypatch))
        assert found == wanted
        tensors = [*critic._model.parameters(), *critic._model.buffers(), *critic._optimizer.moments().values()]
        assert {tensor.device for tensor in tensors} == {GPU}


def test_a_reference_is_on_the_gpu(model_path, data, monkeypatch):
    options = PolicyOptions(frozen=True, top=3)
    wanted = shapes(policy_on(CPU, model_path, options=options).compute_log_probs(data, temperature=1.0))
    with FakeGpu():
        reference = policy_on(chosen(monkeypatch), model_path, options=options)
        assert shapes(reference.compute_log_probs(data, temperature=1.0)) == wanted
        assert {"top_log_probs", "top_tokens"} <= wanted.keys()


@pytest.mark.parametrize("lora", ADAPTERS[:2], ids=NAMES[:2])
def test_a_rollout_on_the_gpu_takes_the_weights_of_a_policy_there(model_path, monkeypatch, lora):
    asked = [GenerationRequest(uid=f"p{i}", session=0, prompt_ids=(2 + i % 5,) * (1 + i % 4)) for i in range(40)]
    with FakeGpu():
        device = chosen(monkeypatch)
        policy, engine = policy_on(device, model_path, lora=lora), HFRolloutEngine(model_path, device=device, lora=lora)
        if lora is None:
            engine.load_weights(list(policy.named_weights()), 1)
        else:
            engine.share_base(policy.base_weights())
            engine.load_adapter(policy.adapter_weights(), 1)
        made = asyncio.run(
            engine.generate(asked, SamplingParams(max_new_tokens=5, top_k=3, temperature=0.7, ignore_eos=True))
        )
    assert [len(one.response_ids) for one in made] == [5] * 40
    assert {one.weight_version for one in made} == {1}


def test_a_reward_model_is_on_the_gpu(tmp_path, monkeypatch):
    config = Qwen2Config(
        vocab_size=14, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_labels=1,
        num_key_value_heads=1, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    Qwen2ForSequenceClassification(config).save_pretrained(tmp_path)
    asked = [Sample(data_source="s", solution_str="", ground_truth="", tokens=tokens) for tokens in ([5, 6], [2])]

    async def here(call, *arguments):  # a thread would not see the fake GPU
        return call(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", here)
    with FakeGpu():
        scorer = RewardModelScorer(RewardModelConfig(path=str(tmp_path), device=str(chosen(monkeypatch))))
        assert [one.numbers["score"] for one in asyncio.run(scorer.score(asked))] == [1.0, 1.0]


def test_a_tensor_left_on_the_cpu_is_an_error_on_the_fake_gpu():
    with FakeGpu() as gpu:
        there = torch.ones(3, device=GPU)
        assert isinstance(there, FakeTensor)
        with pytest.raises(RuntimeError, match="cuda:0 and cpu"):
            there * torch.ones(3)
        assert torch.equal((there * torch.tensor(2.0)).cpu(), torch.ones(3))
        assert gpu.held == 12
        del there
        assert gpu.held == 0
