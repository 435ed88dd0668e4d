"""LoRA in the torch policy: training, export to peft, merging for rollout, reference policy."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import numpy as np
import peft
import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from relative import apart
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rl_protocol import BatchData, ConfigError, WeightSyncError, ragged
from rl_protocol.ports import GenerationRequest, SamplingParams
from rl_protocol.torch import from_weight
from rl_trainer import ActorConfig, CriticConfig, LoraConfig, OptimConfig
from rl_trainer.backends.peft_lora import without_adapter
from rl_trainer.backends.token_batch import token_batch
from rl_trainer.backends.torch_critic import TorchCriticBackend
from rl_trainer.backends.torch_policy import TorchPolicyBackend
from rl_trainer.config.critic import CriticOptimConfig
from rl_trainer.kernels.faster_layers import use_faster_layers
from rl_trainer.rollout.hf_engine import HFRolloutEngine

pytestmark = pytest.mark.numeric

KINDS = {
    "plain": LoraConfig(rank=4, alpha=8),
    "rslora": LoraConfig(rank=4, alpha=8, use_rslora=True, target_modules=("q_proj", "v_proj", "down_proj")),
    "dora": LoraConfig(rank=3, alpha=6, use_dora=True, exclude=("layers.0.mlp.up_proj",)),
}


def policy_with(path, lora, **more):
    config = ActorConfig(optim=OptimConfig(lr=1e-2, weight_decay=0.0), ppo_mini_batch_size=4, **more)
    return TorchPolicyBackend(path, config, lora=lora, seed=3)


def weights(policy):
    return {weight.name: from_weight(weight).clone() for weight in policy.named_weights()}


def logits(model, batch):
    tokens = token_batch(batch, 0)
    with torch.no_grad():
        return tokens.read(model(**tokens.inputs).logits)


@pytest.fixture(params=KINDS)
def lora(request):
    return KINDS[request.param]


def test_the_adapter_alone_is_trained_and_off_it_is_the_reference_policy(model_path, lora, training_batch):
    policy, base = policy_with(model_path, lora), TorchPolicyBackend(model_path, None)
    data = training_batch(policy)
    tokens = data.select_fields(["prompts", "responses"])
    before = base.compute_log_probs(tokens, temperature=0.7)
    first = policy.compute_log_probs(tokens, temperature=0.7)
    assert apart(first.ragged("log_probs").values, before.ragged("log_probs").values) < 1e-6
    for _ in range(3):
        policy.update(data, temperature=1.0)
    now = policy.compute_log_probs(tokens, temperature=0.7)
    assert apart(now.ragged("log_probs").values, before.ragged("log_probs").values) > 1e-3
    reference = policy.compute_reference_log_probs(tokens, temperature=0.7)
    assert reference.ragged("log_probs").values.tolist() == before.ragged("log_probs").values.tolist()
    again = policy.compute_log_probs(tokens, temperature=0.7)
    assert again.ragged("log_probs").values.tolist() == now.ragged("log_probs").values.tolist()


def test_the_merged_weights_are_the_policy(model_path, lora, training_batch):
    policy, plain = policy_with(model_path, lora), AutoModelForCausalLM.from_pretrained(model_path).eval()
    data = training_batch(policy)
    first = weights(policy)
    policy.update(data, temperature=1.0)
    merged = weights(policy)
    assert merged.keys() == plain.state_dict().keys()
    changed = {name.split(".")[-2] for name in merged if not torch.equal(first[name], merged[name])}
    assert changed == set(lora.targets())
    same = [name for name in merged if any(name.removesuffix(".weight").endswith(x) for x in lora.exclude)]
    assert all(torch.equal(first[name], merged[name]) for name in same)
    assert bool(same) == bool(lora.exclude)
    plain.load_state_dict(merged)
    scores = logits(plain, data)
    log_p = torch.log_softmax(scores, -1).gather(-1, token_batch(data, 0).targets[:, None]).squeeze(-1)
    own = policy.compute_log_probs(data, temperature=1.0).ragged("log_probs").values
    # float32 rounds the sums that make the logits
    assert np.abs(log_p.numpy() - own).max() < 1e-5 * scores.abs().max()
    assert all(torch.equal(a, b) for a, b in zip(weights(policy).values(), merged.values(), strict=True))


def test_the_exported_adapter_loads_in_peft_with_equal_logits(model_path, lora, training_batch, tmp_path):
    policy = policy_with(model_path, lora)
    data = training_batch(policy)
    policy.update(data, temperature=1.0)
    policy.save_pretrained(tmp_path / "checkpoint")
    base = AutoModelForCausalLM.from_pretrained(model_path)
    use_faster_layers(base)  # which the policy has, and which round otherwise
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "checkpoint")
    assert logits(loaded.eval(), data).tolist() == logits(policy._model, data).tolist()
    ours, theirs = weights(policy), loaded.merge_and_unload().state_dict()
    assert ours.keys() == theirs.keys()
    assert all(apart(ours[name], theirs[name]) < 1e-6 for name in ours)
    written = json.loads((tmp_path / "checkpoint" / "adapter_config.json").read_text())
    assert (written["r"], written["lora_alpha"], written["use_rslora"], written["use_dora"]) == (
        lora.rank,
        lora.alpha,
        lora.use_rslora,
        lora.use_dora,
    )
    assert set(written["target_modules"]) == set(lora.targets())
    assert all(".lora_" in name for name in load_file(tmp_path / "checkpoint" / "adapter_model.safetensors"))
    assert (tmp_path / "checkpoint" / "tokenizer.json").exists()


def test_the_gradient_is_the_gradient_of_the_formula(model_path, training_batch):
    """The gradient of B is scale * (dL/dW) A^T, because B A is 0 at first.

    dL/dW is that of the model without adapters.
    """
    lora = LoraConfig(rank=4, alpha=8, target_modules=("q_proj",))
    policy = TorchPolicyBackend(model_path, ActorConfig(optim=OptimConfig(lr=1e-3, grad_clip=1e9)), lora=lora, seed=3)
    data = training_batch(policy)
    state = policy._model.state_dict()
    norm = policy.update(data, temperature=1.0)["actor/grad_norm"]
    model, tokens = AutoModelForCausalLM.from_pretrained(model_path).eval(), token_batch(data, 0)
    log_p = torch.log_softmax(tokens.read(model(**tokens.inputs).logits), -1).gather(-1, tokens.targets[:, None])[:, 0]
    mask = torch.tensor(data.ragged("response_mask").values)
    (-(torch.tensor(data.ragged("advantages").values) * log_p)[mask].sum() / mask.sum()).backward()
    squares = 0.0
    for name, weight in model.named_parameters():
        if name.endswith("q_proj.weight"):
            a = state[f"base_model.model.{name.removesuffix('.weight')}.lora_A.default.weight"]
            squares += float(((lora.scaling * weight.grad @ a.T) ** 2).sum())
    assert norm == pytest.approx(squares**0.5, rel=1e-4)


def test_dropout_acts_in_updates_alone(model_path, training_batch):
    def norm(dropout):
        policy = policy_with(model_path, LoraConfig(rank=4, dropout=dropout))
        data = training_batch(policy)
        torch.manual_seed(0)
        found = policy.update(data, temperature=1.0)["actor/grad_norm"]
        first, second = (policy.compute_log_probs(data, temperature=1.0).ragged("log_probs").values for _ in range(2))
        assert first.tolist() == second.tolist()
        return found

    assert norm(0.5) != pytest.approx(norm(0.0), rel=1e-3)


def test_a_fresh_adapter_leaves_the_generators_of_gpus_as_they_are(model_path, monkeypatch):
    """They are seeded for each rank and role, and draw the dropout of adapters."""
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    torch.manual_seed(5)
    TorchPolicyBackend(model_path, None, lora=LoraConfig(rank=4), seed=3)
    TorchCriticBackend(model_path, CriticConfig(use_lora=True), lora=LoraConfig(rank=4), rollout_n=1, seed=3)
    assert seeded == [5]


def test_a_fresh_adapter_depends_on_its_seed_alone(model_path):
    def adapter(seed):
        policy = TorchPolicyBackend(model_path, None, lora=LoraConfig(rank=4), seed=seed)
        return {name: tensor for name, tensor in policy._model.state_dict().items() if "lora_A" in name}

    torch.manual_seed(5)
    first, state = adapter(1), torch.random.get_rng_state()
    second, other = adapter(1), adapter(2)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": -1}, r"^rank must be at least 0; got -1"),
        ({"alpha": 0.0}, r"^alpha must be greater than 0"),
        ({"dropout": 1.0}, r"^dropout must be in \[0, 1\)"),
        ({"target_modules": ("q_proj", "k_prj")}, r"got 'k_prj'\. Did you mean 'k_proj'\?"),
        ({"target_modules": ()}, r"^target_modules must be all-linear or names"),
        ({"exclude": ("layers.0.mlp.upproj",)}, r"^exclude .* Did you mean 'up_proj'\?"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        LoraConfig(**settings)


def test_scaling_by_hand():
    assert LoraConfig(rank=16, alpha=32).scaling == 2.0
    assert LoraConfig(rank=16, alpha=32, use_rslora=True).scaling == 8.0


def test_a_policy_without_lora_has_no_reference_in_it(model_path, training_batch):
    policy = TorchPolicyBackend(model_path, None)
    with pytest.raises(ConfigError, match=r"LoraConfig\.rank=0"):
        policy.compute_reference_log_probs(BatchData({}), temperature=1.0)


def test_a_rollout_engine_with_the_adapter_alone_has_the_trainers_policy(model_path, lora, training_batch):
    """The adapter that is sent and merged in the engine gives the merged weights bit for bit."""
    policy = policy_with(model_path, lora)
    engine = HFRolloutEngine(model_path, lora=lora)
    requests = [GenerationRequest(uid=f"p{i}", session=0, prompt_ids=(2 + i % 5,) * (1 + i % 4)) for i in range(8)]
    data = training_batch(policy)
    before = [g.log_probs for g in generate(engine, requests)]
    for version in (1, 2):
        policy.update(data, temperature=1.0)
        adapter, merged = list(policy.adapter_weights()), weights(policy)
        engine.load_adapter(adapter, version)
        assert engine.weight_version == version
        state = engine._model.state_dict()
        assert all(torch.equal(state[name], merged[name]) for name in merged)
    assert sum(weight.nbytes for weight in adapter) < sum(tensor.nbytes for tensor in merged.values()) / 3
    made = generate(engine, requests)
    assert [g.log_probs for g in made] != before
    tokens = {
        "prompts": ragged([r.prompt_ids for r in requests], "int64"),
        "responses": ragged([g.response_ids for g in made], "int64"),
    }
    own = policy.compute_log_probs(BatchData(tokens), temperature=1.0).ragged("log_probs").values
    assert apart(np.concatenate([one.log_probs for one in made]), own) < 1e-5


def test_an_engine_that_merges_adapters_copies_weights_that_it_is_lent(model_path):
    lora = KINDS["plain"]
    policy, engine = policy_with(model_path, lora), HFRolloutEngine(model_path, lora=lora)
    whole = list(policy.named_weights())
    before = [weight.data.tobytes() for weight in whole]
    assert not engine.capabilities.adopts
    engine.load_weights(whole, 1)
    engine.load_adapter([replace(w, data=np.full_like(w.data, 1)) for w in policy.adapter_weights()], 2)
    assert [weight.data.tobytes() for weight in whole] == before


def generate(engine, requests):
    return asyncio.run(engine.generate(requests, SamplingParams(max_new_tokens=6)))


def test_a_rollout_in_bfloat16_rounds_what_base_and_adapter_make_together(model_path, training_batch):
    lora = KINDS["plain"]
    policy, engine = policy_with(model_path, lora), HFRolloutEngine(model_path, dtype="bfloat16", lora=lora)
    policy.update(training_batch(policy), temperature=1.0)
    engine.load_adapter(policy.adapter_weights(), 1)
    state = engine._model.state_dict()
    assert all(torch.equal(state[name], tensor.bfloat16()) for name, tensor in weights(policy).items())


def test_an_adapter_that_does_not_fit_the_rollout_is_refused_and_changes_nothing(model_path):
    lora = KINDS["plain"]
    engine, fresh = HFRolloutEngine(model_path, lora=lora), list(policy_with(model_path, lora).adapter_weights())
    before = {name: tensor.clone() for name, tensor in engine._model.state_dict().items()}
    other = policy_with(model_path, LoraConfig(rank=2)).adapter_weights()
    for wrong, message in ((fresh[1:], "missing"), (other, r"rollout model has \('float32', \(4,")):
        with pytest.raises(WeightSyncError, match=message):
            engine.load_adapter(wrong, 1)
    with pytest.raises(WeightSyncError, match="made without `lora`"):
        HFRolloutEngine(model_path).load_adapter(fresh, 1)
    with pytest.raises(ConfigError, match="no adapter to send"):
        list(TorchPolicyBackend(model_path, None).adapter_weights())
    assert engine.weight_version == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine._model.state_dict().items())


def critic_with(path, lora):
    config = CriticConfig(optim=CriticOptimConfig(lr=1e-2), ppo_mini_batch_size=4)
    return TorchCriticBackend(path, config, lora=lora, rollout_n=1, seed=3)


def test_a_critic_trains_its_head_and_adapters_alone(model_path, lora, training_batch, tmp_path):
    """Its values are those of a plain body with peft's merged weights, and survive a snapshot."""
    data = training_batch(TorchPolicyBackend(model_path, None))
    more = {
        name: ragged([[0.5] * n for n in data.ragged("responses").lengths], "float32") for name in ("returns", "values")
    }
    data = BatchData({**data.columns, **more})
    tokens = data.select_fields(["prompts", "responses"])
    critic = critic_with(model_path, lora)
    assert not critic.compute_values(tokens).ragged("values").values.any()
    before = {name: weight.detach().clone() for name, weight in critic._model.named_parameters()}
    for _ in range(3):
        critic.update(data)
    changed = {name for name, weight in critic._model.named_parameters() if not torch.equal(weight, before[name])}
    assert changed == {name for name in before if ".lora_" in name or name.startswith("head.")}
    values = critic.compute_values(tokens).ragged("values").values
    assert values.std() > 1e-3
    critic.snapshot()(tmp_path)
    again = critic_with(model_path, lora)
    again.restore(tmp_path)
    assert again.compute_values(tokens).ragged("values").values.tolist() == values.tolist()
    for module in critic._model.modules():
        if isinstance(module, BaseTunerLayer):
            module.merge(safe_merge=True)
    plain = AutoModelForCausalLM.from_pretrained(model_path).eval().base_model
    merged = {name.replace(".base_layer", ""): weight for name, weight in critic._model.body.state_dict().items()}
    plain.load_state_dict({name: weight for name, weight in merged.items() if ".lora_" not in name})
    read = token_batch(tokens, 0)
    with torch.no_grad():
        expected = critic._model.head(read.read(plain(**read.inputs).last_hidden_state)).squeeze(-1)
    assert apart(values, expected) < 1e-5


def test_adapters_that_are_off_stay_trainable(model_path):
    policy = TorchPolicyBackend(model_path, ActorConfig(), lora=LoraConfig(rank=2))
    trained = {name for name, weight in policy._model.named_parameters() if weight.requires_grad}
    assert trained
    for _ in range(2):
        with without_adapter(policy._model):
            assert {name for name, weight in policy._model.named_parameters() if weight.requires_grad} == trained
            assert policy._model.base_model.model.model.layers[0].self_attn.q_proj.disable_adapters
    assert {name for name, weight in policy._model.named_parameters() if weight.requires_grad} == trained
    assert not policy._model.base_model.model.model.layers[0].self_attn.q_proj.disable_adapters
