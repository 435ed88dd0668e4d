"""The torch policy and critic: log-probs against a naive forward pass, updates against autograd."""

from __future__ import annotations

import weakref
from itertools import chain

import numpy as np
import pytest
import torch
from relative import apart, near
from transformers import AutoModelForCausalLM

from rl_protocol import BatchData, BatchError, ConfigError, OutputError, ragged
from rl_protocol.torch import from_weight
from rl_trainer import ActorConfig, CriticConfig, LoraConfig, OptimConfig
from rl_trainer.algorithms.batching import schedule_rows
from rl_trainer.backends.forward_passes import ForwardPasses
from rl_trainer.backends.loading import load_model
from rl_trainer.backends.optimizer import MiniBatchOptimizer
from rl_trainer.backends.token_batch import token_batch
from rl_trainer.backends.torch_critic import TorchCriticBackend
from rl_trainer.backends.torch_policy import PolicyOptions, TorchPolicyBackend
from rl_trainer.backends.world import World
from rl_trainer.config.optim import Schedule
from rl_trainer.rollout.hf_engine import HFRolloutEngine

pytestmark = pytest.mark.numeric

PROMPTS = [[2, 3], [4], [5, 6, 7], [2]]
RESPONSES = [[8, 1], [9, 9, 9], [3], [4, 1]]


def batch(**columns):
    return BatchData({"prompts": ragged(PROMPTS, "int64"), "responses": ragged(RESPONSES, "int64"), **columns})


def like_responses(fill, dtype="float32"):
    rng = np.random.default_rng(1)
    return ragged([[fill(rng) for _ in row] for row in RESPONSES], dtype)


def training_batch(policy):
    log_probs = policy.compute_log_probs(batch(), temperature=1.0)["log_probs"]
    return batch(
        response_mask=ragged([[True] * len(r) for r in RESPONSES], "bool"),
        old_log_probs=log_probs,
        advantages=like_responses(lambda rng: rng.normal()),
        ref_log_prob=like_responses(lambda rng: -2 + 0.1 * rng.normal()),
    )


def test_log_probs_equal_one_unpadded_forward_per_row(model_path):
    policy = TorchPolicyBackend(model_path, None, options=PolicyOptions(forward_rows=3))
    out = policy.compute_log_probs(batch(), temperature=0.8)
    model = AutoModelForCausalLM.from_pretrained(model_path).eval()
    log_probs, entropy = list[float](), list[float]()
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        with torch.no_grad():
            log_p = torch.log_softmax(model(torch.tensor([prompt + response])).logits[0] / 0.8, -1)
        log_p = log_p[len(prompt) - 1 : -1]
        log_probs += log_p[range(len(response)), response].tolist()
        entropy += (-(log_p.exp() * log_p).sum(-1)).tolist()
    assert out.ragged("log_probs").lengths.tolist() == [len(response) for response in RESPONSES]
    assert apart(out.ragged("log_probs").values, log_probs) < ROUNDING
    assert apart(out.ragged("entropy").values, entropy, log_probs) < ROUNDING


def test_the_output_layer_reads_response_tokens_alone(model_path):
    policy, seen = TorchPolicyBackend(model_path, None), []
    policy._model.lm_head.register_forward_hook(lambda _, args, out: seen.append(tuple(out.shape[:2])))
    prompts, responses = [[2, 3, 4, 5], [5, 6, 7]], [[8, 1], [9, 9, 9, 1]]
    data = BatchData({"prompts": ragged(prompts, "int64"), "responses": ragged(responses, "int64")})
    found = policy.compute_log_probs(data, temperature=1.0).ragged("log_probs")
    assert seen == [(2, 6)]  # log-probs and entropy of 6 tokens
    expected = list[float]()
    for prompt, response in zip(prompts, responses, strict=True):
        with torch.no_grad():
            log_p = torch.log_softmax(policy._model(torch.tensor([prompt + response])).logits[0], -1)
        expected += log_p[len(prompt) - 1 : -1][range(len(response)), response].tolist()
    assert apart(found.values, expected) < ROUNDING


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2, target_modules=("q_proj",))], ids=["whole", "adapters"])
def test_persistent_buffers_are_sent_and_others_are_not(model_path, lora, monkeypatch):
    """Persistent buffers are part of the model; each process computes the others itself."""
    made = AutoModelForCausalLM.from_pretrained

    def with_buffers(*args, **how):
        model, found = made(*args, **how)
        model.model.register_buffer("counts", torch.tensor([3, 5]))
        model.model.register_buffer("scratch", torch.zeros(4), persistent=False)
        return model, found

    monkeypatch.setattr("rl_trainer.backends.loading.AutoModelForCausalLM.from_pretrained", with_buffers)
    policy = TorchPolicyBackend(model_path, ActorConfig(ppo_mini_batch_size=4), lora=lora)
    next(module for module in policy._model.modules() if "counts" in module._buffers).counts += 2
    sent = {weight.name: weight for weight in policy.named_weights()}
    assert "model.scratch" not in sent
    assert (sent["model.counts"].dtype, from_weight(sent["model.counts"]).tolist()) == ("int64", [5, 7])
    engine = HFRolloutEngine(model_path)
    engine.load_weights(policy.named_weights(), 1)
    assert engine._model.model.counts.tolist() == [5, 7]


def test_an_empty_prompt_is_an_error():
    data = BatchData({"prompts": ragged([[1], []], "int64"), "responses": ragged([[1], [1]], "int64")})
    with pytest.raises(BatchError, match=r"Row 1 has .* every prompt needs at least one token"):
        token_batch(data, 0)


ROUNDING = 1e-5
"""Relative error of a float32 result of this model, in any order of summation.

Some 20 consecutive sums of at most 64 terms, with an error of 2 ** -24 each, give 8e-5 if all
errors have the same sign, and about sqrt(64 * 20) * 2 ** -24 = 2e-6 if the signs are random.
"""


def parameters(policy):
    return torch.cat([from_weight(w).flatten().clone() for w in policy.named_weights()])


def gradient(backend):
    """Return the gradient [P] of the last optimizer step in float64."""
    return torch.cat([p.grad.flatten().double() for p in backend._model.parameters() if p.grad is not None])


def assert_same_update(results, data):
    """Check that the (gradient, metrics) pairs in `results` agree up to rounding.

    Weights are not compared, because the first step of Adam is lr * sign(gradient), even for a
    gradient that is only rounding.
    """
    for given, metrics in results[1:]:
        assert torch.linalg.vector_norm(given - results[0][0]) <= ROUNDING * torch.linalg.vector_norm(results[0][0])
        assert metrics == near(results[0][1], ROUNDING, data)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "token-sum"])
def test_micro_batches_do_not_change_the_update(model_path, mode):
    results = []
    for micro in (0, 1, 3):
        config = ActorConfig(
            optim=OptimConfig(lr=1e-3, grad_clip=1e9),  # clipping would change the norm
            ppo_mini_batch_size=4,
            ppo_micro_batch_size=micro,
            loss_agg_mode=mode,
            use_kl_loss=True,
            entropy_coeff=0.01,
        )
        policy = TorchPolicyBackend(model_path, config, seed=0)
        data = training_batch(policy)
        metrics = policy.update(data, temperature=1.0)
        results.append((gradient(policy), metrics))
    assert_same_update(results, data)
    assert all(isinstance(v, float) for v in results[0][1].values())


def test_the_first_gradient_is_the_gradient_of_the_formula(model_path):
    """With one mini-batch and ratio 1, the loss is -mean(A * log_prob) up to a constant."""
    config = ActorConfig(optim=OptimConfig(lr=1e-3, grad_clip=1e9), ppo_mini_batch_size=4)
    policy = TorchPolicyBackend(model_path, config, seed=0)
    data = training_batch(policy)
    metrics = policy.update(data, temperature=1.0)
    model = load_model(model_path)
    total = 0.0
    for i, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        log_p = torch.log_softmax(model(torch.tensor([prompt + response])).logits[0], -1)
        for k, token in enumerate(response):
            total = total - float(data.ragged("advantages").row(i)[k]) * log_p[len(prompt) - 1 + k, token]
    (total / sum(map(len, RESPONSES))).backward()
    norm = torch.sqrt(sum((p.grad**2).sum() for p in model.parameters() if p.grad is not None)).item()
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)
    advantages = data.ragged("advantages").values
    assert apart(metrics["actor/pg_loss"], -advantages.mean(), advantages) < ROUNDING
    assert apart(metrics["actor/ppo_kl"], 0.0, data.ragged("old_log_probs").values) < ROUNDING


def test_mini_batches_cover_every_row_once_per_epoch_in_a_fresh_order():
    schedule, lengths = (
        Schedule(epochs=2, mini_batch_rows=3, seed=5),
        np.array([9, 1, 2, 8, 3, 3, 2, 8]),
    )
    rows = list(schedule_rows(lengths, schedule, update=0))
    assert [sorted(map(len, epoch)) for epoch in (rows[:3], rows[3:])] == [[2, 3, 3]] * 2
    assert sorted(chain(*rows[:3])) == sorted(chain(*rows[3:])) == list(range(8))
    assert rows[:3] != rows[3:]
    assert rows == list(schedule_rows(lengths, schedule, update=0))
    assert rows != list(schedule_rows(lengths, schedule, update=1))
    assert list(schedule_rows(lengths[:0], schedule, update=0)) == []
    tokens = [int(lengths[part].sum()) for part in rows[:3]]
    assert max(tokens) - min(tokens) <= 9


def test_a_gradient_that_is_not_finite_is_skipped_and_counted(model_path):
    policy = TorchPolicyBackend(model_path, ActorConfig(ppo_mini_batch_size=4), seed=0)
    before = parameters(policy)
    good = training_batch(policy)
    bad = BatchData({**good.columns, "advantages": like_responses(lambda rng: float("nan"))})
    metrics = policy.update(bad, temperature=1.0)
    assert metrics["actor/skipped_steps"] == 1.0
    assert np.isnan(metrics["actor/grad_norm"])
    assert torch.equal(parameters(policy), before)


def test_the_gradient_norm_is_that_of_the_steps_that_were_made(model_path):
    policy = TorchPolicyBackend(model_path, ActorConfig(ppo_mini_batch_size=2), seed=0)
    good, first = training_batch(policy), iter([float("nan")])
    bad = BatchData({**good.columns, "advantages": like_responses(lambda rng: next(first, 1.0))})
    metrics = policy.update(bad, temperature=1.0)
    assert metrics["actor/skipped_steps"] == 1.0
    assert np.isfinite(metrics["actor/grad_norm"])


def test_the_learning_rate_rises_over_the_warm_up(model_path):
    config = ActorConfig(optim=OptimConfig(lr=1e-3, lr_warmup_steps=4), ppo_mini_batch_size=2)
    policy = TorchPolicyBackend(model_path, config, seed=0)
    data = training_batch(policy)
    assert policy.update(data, temperature=1.0)["actor/lr"] == pytest.approx(5e-4)
    assert policy.update(data, temperature=1.0)["actor/lr"] == pytest.approx(1e-3)
    assert policy.update(data, temperature=1.0)["actor/lr"] == pytest.approx(1e-3)


def test_an_update_that_makes_no_step_does_not_report_the_full_learning_rate(model_path):
    """As the first one after a resume, when the weights had diverged before."""
    policy = TorchPolicyBackend(model_path, ActorConfig(optim=OptimConfig(lr=1e-3, lr_warmup_steps=4)), seed=0)
    bad = {**training_batch(policy).columns, "advantages": like_responses(lambda rng: float("nan"))}
    metrics = policy.update(BatchData(bad), temperature=1.0)
    assert (metrics["actor/skipped_steps"], metrics["actor/lr"]) == (1.0, 0.0)


def test_a_frozen_policy_refuses_updates_and_an_unreadable_path_is_named(model_path, tmp_path):
    with pytest.raises(ConfigError, match="frozen"):
        TorchPolicyBackend(model_path, None).update(batch(), temperature=1.0)
    with pytest.raises(ConfigError, match=str(tmp_path)):
        TorchPolicyBackend(tmp_path, None)


def test_the_saved_checkpoint_loads_in_transformers_with_equal_logits(model_path, tmp_path):
    policy = TorchPolicyBackend(model_path, ActorConfig(optim=OptimConfig(lr=1e-2), ppo_mini_batch_size=4), seed=0)
    policy.update(training_batch(policy), temperature=1.0)
    policy.save_pretrained(tmp_path)
    loaded = TorchPolicyBackend(tmp_path, None).compute_log_probs(batch(), temperature=1.0)
    own = policy.compute_log_probs(batch(), temperature=1.0)
    assert loaded.ragged("log_probs").values.tolist() == own.ragged("log_probs").values.tolist()
    assert (tmp_path / "tokenizer.json").exists()


def critic_batch(critic):
    return batch(
        response_mask=ragged([[True] * len(r) for r in RESPONSES], "bool"),
        values=critic.compute_values(batch())["values"],
        returns=ragged([[0.3] * len(r) for r in RESPONSES], "float32"),
    )


def test_the_critic_starts_at_zero_and_learns_its_returns(model_path):
    critic = TorchCriticBackend(
        model_path, CriticConfig(optim=OptimConfig(lr=1e-2), ppo_mini_batch_size=4), rollout_n=1, seed=0
    )
    first = critic_batch(critic)
    assert not first.ragged("values").values.any()
    losses = [critic.update(critic_batch(critic))["critic/vf_loss"] for _ in range(30)]
    assert losses[0] == pytest.approx(0.5 * 0.09)
    assert losses[-1] < 0.01 * losses[0]


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_micro_batches_do_not_change_the_critics_update(model_path, mode):
    """A loss normalized per micro-batch would grow with the number of micro-batches."""
    results = []
    for micro in (0, 1, 3):
        config = CriticConfig(
            optim=OptimConfig(lr=1e-2, grad_clip=1e9),
            ppo_mini_batch_size=4,
            ppo_micro_batch_size=micro,
            loss_agg_mode=mode,
        )
        critic = TorchCriticBackend(model_path, config, rollout_n=1, seed=0)
        data = critic_batch(critic)
        metrics = critic.update(data)
        results.append((gradient(critic), metrics))
    assert_same_update(results, data)


def test_a_checkpoint_that_cannot_be_written_names_its_path(model_path, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=f"{tmp_path}/file/checkpoint"):
        TorchPolicyBackend(model_path, None).save_pretrained(tmp_path / "file" / "checkpoint")


def test_what_a_micro_batch_computed_is_gone_before_the_next():
    """Outputs that are kept until the end of an update need the memory of all micro-batches."""
    model, alive = torch.nn.Linear(1, 1), []
    optimizer = MiniBatchOptimizer(model, OptimConfig(), ForwardPasses(world=World(), max_rows=1))

    def loss(micro, counts, means):
        assert not any(reference() is not None for reference in alive)
        out = model(torch.ones(3, 1)).sum()
        alive.append(weakref.ref(out))
        return out

    data = batch(response_mask=like_responses(lambda rng: True, "bool"))
    optimizer.run(data, [[0, 1, 2, 3]], loss)
    assert len(alive) == 4
