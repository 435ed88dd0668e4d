"""Mixed precision of the torch engine, against float32 and against a model of bfloat16 weights."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_protocol import BatchData
from rl_protocol.torch import from_weight
from rl_trainer import ActorConfig, CriticConfig, LoraConfig, OptimConfig, TorchConfig
from rl_trainer.backends.compute_weights import ComputeWeights, warn_if_slow
from rl_trainer.backends.parallel_strategy import PlainStrategy
from rl_trainer.backends.torch_critic import TorchCriticBackend
from rl_trainer.backends.torch_policy import PolicyOptions, TorchPolicyBackend

BF16 = TorchConfig(param_dtype="bfloat16")


def policy(path, config=None, *, lora=None):
    made = ActorConfig(optim=OptimConfig(lr=1e-3), ppo_mini_batch_size=8, ppo_micro_batch_size=3, use_kl_loss=True)
    return TorchPolicyBackend(path, made, lora=lora, strategy=PlainStrategy(config or TorchConfig()))


def gradients(backend):
    return torch.cat([weight.grad.flatten() for weight in backend._model.parameters() if weight.grad is not None])


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)], ids=["whole", "adapters"])
def test_gradients_agree_with_float32_up_to_bfloat16(model_path, training_batch, lora):
    exact, half = policy(model_path, lora=lora), policy(model_path, BF16, lora=lora)
    data = training_batch(exact, rows=8)
    one, other = exact.update(data, temperature=1.0), half.update(data, temperature=1.0)
    want, got = gradients(exact), gradients(half)
    assert got.dtype == torch.float32
    distance = float(torch.linalg.vector_norm(got - want) / torch.linalg.vector_norm(want))
    assert 1e-5 < distance < 0.05  # 2 ** -8 per number; not the float32 computation itself
    assert other["actor/grad_norm"] == pytest.approx(one["actor/grad_norm"], rel=0.05)


def test_master_weights_are_float32_and_keep_small_updates(model_path, training_batch):
    half = policy(model_path, BF16)
    half.update(training_batch(half, rows=8), temperature=1.0)
    for weight in half.named_weights():
        tensor = from_weight(weight)
        assert tensor.dtype == torch.float32
        assert float((tensor.bfloat16().float() != tensor).float().mean()) > 0.5, weight.name


def test_each_pass_sees_the_newest_weights(model_path, training_batch, tmp_path):
    half = policy(model_path, BF16)
    data = training_batch(half, rows=8)

    def expected():
        """The log-probs of the rounded weights in float32, row by row."""
        model = AutoModelForCausalLM.from_pretrained(model_path).eval()
        model.load_state_dict({w.name: from_weight(w).bfloat16().float() for w in half.named_weights()})
        found = []
        for prompt, response in zip(data.ragged("prompts").rows(), data.ragged("responses").rows(), strict=True):
            ids = torch.tensor([*prompt.tolist(), *response.tolist()])
            with torch.no_grad():
                log_p = torch.log_softmax(model(ids[None]).logits[0], -1)
            found += log_p[len(prompt) - 1 : -1].gather(-1, ids[len(prompt) :, None])[:, 0].tolist()
        return np.array(found)

    def computed():
        return half.compute_log_probs(data, temperature=1.0).ragged("log_probs").values

    def distance(one, other):
        return float(np.linalg.norm(one - other) / np.linalg.norm(other))

    half.update(data, temperature=1.0)
    half.snapshot()(tmp_path)
    first = computed()
    assert distance(first, expected()) < 0.01
    for _ in range(5):
        half.update(data, temperature=1.0)
    assert distance(computed(), first) > 0.02
    assert distance(computed(), expected()) < 0.01
    half.restore(tmp_path)
    assert np.array_equal(computed(), first)


def test_a_reference_holds_nothing_but_bfloat16_and_computes_what_the_policy_does(model_path, training_batch):
    trained = policy(model_path, BF16)
    options = PolicyOptions(frozen=True)
    frozen = TorchPolicyBackend(model_path, trained._config, strategy=PlainStrategy(BF16), options=options)
    data = training_batch(trained, rows=8)
    assert {weight.dtype for weight in frozen._model.parameters()} == {torch.bfloat16}
    one, other = (backend.compute_log_probs(data, temperature=0.7) for backend in (trained, frozen))
    for name in one.field_names:
        assert np.array_equal(one.ragged(name).values, other.ragged(name).values), name


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_the_base_of_adapters_is_bfloat16_and_is_sent_and_merged_in_float32(model_path, training_batch, tmp_path, dora):
    lora = LoraConfig(rank=2, use_dora=dora, merge_on_save=True)
    half, merged = policy(model_path, BF16, lora=lora), policy(model_path, BF16, lora=lora)
    half.update(training_batch(half, rows=8), temperature=1.0)
    held = {weight.requires_grad: weight.dtype for weight in half._model.parameters()}
    assert held == {True: torch.float32, False: torch.bfloat16}
    sent = {weight.name: from_weight(weight) for weight in half.named_weights()}
    assert {tensor.dtype for tensor in sent.values()} == {torch.float32}
    for name, weight in AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).named_parameters():
        equal = torch.equal(sent[name], weight.bfloat16().float())
        assert equal != ("q_proj.weight" in name or lora.covers(name.removesuffix(".weight"))), name
    half.save_pretrained(tmp_path / "saved")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto")
    for name, weight in saved.named_parameters():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, sent[name]), name
    half.snapshot()(tmp_path)
    merged.restore(tmp_path)
    assert merged.state_digest() == half.state_digest()


def test_tied_weights_have_one_copy_and_one_gradient():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = torch.nn.Embedding(4, 2), torch.nn.Linear(2, 4, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids):
            return self.head(self.embedding(ids))

    model = Tied()
    with torch.no_grad():
        model.embedding.weight.copy_(torch.arange(8.0).view(4, 2))
    ComputeWeights(model, torch.bfloat16)
    for _ in range(2):
        out = model(torch.tensor([1]))
        assert out.dtype == torch.bfloat16
        out[0, 3].backward()  # w[1] @ w[3]
    assert model.head.weight is model.embedding.weight
    assert model.head.weight.grad.tolist() == [[0, 0], [12, 14], [0, 0], [4, 6]]


def test_a_critic_learns_in_bfloat16(model_path, training_batch):
    data = training_batch(TorchPolicyBackend(model_path, None), rows=8)
    columns = {"values": data.ragged("ref_log_prob"), "returns": data.ragged("advantages")}
    data = BatchData({**data.columns, **columns})
    config = CriticConfig(optim=OptimConfig(lr=1e-3), ppo_mini_batch_size=8)
    exact, half = (
        TorchCriticBackend(model_path, config, rollout_n=1, seed=0, strategy=PlainStrategy(how))
        for how in (TorchConfig(), BF16)
    )
    for _ in range(3):
        one, other = exact.update(data), half.update(data)
    assert other["critic/vf_loss"] == pytest.approx(one["critic/vf_loss"], rel=0.02)
    one, other = (critic.compute_values(data).ragged("values").values for critic in (exact, half))
    assert np.linalg.norm(one - other) <= 0.05 * np.linalg.norm(one)


@pytest.mark.parametrize(("has", "said"), [(True, 0), (False, 1)])
def test_a_cpu_without_bfloat16_is_named(monkeypatch, caplog, has, said):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": has, "avx2": True})
    with caplog.at_level(logging.WARNING):
        warn_if_slow()
    assert len(caplog.records) == said
