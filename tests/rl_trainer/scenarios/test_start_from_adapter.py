"""Policy and critic on torch continue adapters of peft; the policy saves and merges them."""

from __future__ import annotations

from dataclasses import replace

import peft
import pytest
import torch
from relative import apart
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from rl_protocol import ConfigError
from rl_trainer import ActorConfig, CriticConfig, LoraConfig, OptimConfig
from rl_trainer.backends.token_batch import token_batch
from rl_trainer.backends.torch_critic import TorchCriticBackend
from rl_trainer.backends.torch_policy import TorchPolicyBackend
from rl_trainer.rollout.hf_engine import HFRolloutEngine

pytestmark = pytest.mark.numeric

KINDS = {
    "plain": LoraConfig(rank=4, alpha=8),
    "rslora": LoraConfig(rank=4, alpha=8, use_rslora=True, target_modules=("q_proj", "v_proj", "down_proj")),
    "dora": LoraConfig(rank=3, alpha=6, use_dora=True, exclude=("layers.0.mlp.up_proj",)),
}


@pytest.fixture(scope="module", params=KINDS)
def saved(request, model_path, tmp_path_factory):
    """Options with the path of an adapter that changes the logits, and peft's model."""
    lora, folder = KINDS[request.param], tmp_path_factory.mktemp("peft")
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=int(lora.alpha),
        target_modules=list(lora.targets()),
        exclude_modules=list(lora.exclude) or None,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model_path), settings).eval()
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.5)
        if "magnitude" in name:
            weight.data *= 1.5
    model.save_pretrained(str(folder))
    return replace(lora, adapter_path=str(folder)), model


def policy_of(path, lora):
    config = ActorConfig(optim=OptimConfig(lr=1e-2, weight_decay=0.0), ppo_mini_batch_size=4)
    return TorchPolicyBackend(path, config, lora=lora, seed=3)


def logits(model, batch):
    tokens = token_batch(batch, 0)
    with torch.no_grad():
        return tokens.read(model(**tokens.inputs).logits)


def test_its_logits_are_pefts_and_training_continues_from_them(model_path, saved, training_batch, tmp_path):
    lora, theirs = saved
    policy = policy_of(model_path, lora)
    batch = training_batch(policy)
    expected = logits(theirs, batch)
    fresh = logits(policy_of(model_path, replace(lora, adapter_path=""))._model, batch)
    assert apart(logits(policy._model, batch), expected) < 1e-5
    assert apart(fresh, expected) > 1e-2
    policy.update(batch, temperature=1.0)
    now = logits(policy._model, batch)
    assert apart(now, expected) > 1e-3
    policy.save_pretrained(tmp_path / "next")
    again = policy_of(model_path, replace(lora, adapter_path=str(tmp_path / "next")))
    assert torch.equal(logits(again._model, batch), now)


def test_the_rollout_takes_it_as_version_0(model_path, saved):
    lora, theirs = saved
    policy, engine = policy_of(model_path, lora), HFRolloutEngine(model_path, lora=lora)
    engine.load_adapter(list(policy.adapter_weights()), 0)
    ids = torch.tensor([[3, 4, 5, 6, 7]])
    with torch.no_grad():
        expected, got = theirs(ids).logits, engine._model(ids).logits
    assert apart(got, expected) < 1e-5


def test_merged_on_save_it_is_the_plain_model_that_peft_merges(model_path, saved, training_batch, tmp_path):
    lora, _ = saved
    policy = policy_of(model_path, replace(lora, merge_on_save=True))
    policy.update(training_batch(policy), temperature=1.0)
    policy.save_pretrained(tmp_path / "merged")
    assert not list((tmp_path / "merged").glob("adapter_*"))
    adapter = policy_of(model_path, lora)
    adapter.update(training_batch(adapter), temperature=1.0)
    adapter.save_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(model_path)
    expected = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().state_dict()
    plain, info = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    found = plain.state_dict()
    assert found.keys() == expected.keys()
    assert max(apart(found[name], expected[name]) for name in found) < 1e-6
    assert (tmp_path / "merged" / "tokenizer.json").exists()


def test_tied_weights_stay_tied_in_a_merged_model(model_path, tmp_path):
    base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_path, tie_word_embeddings=True))
    base.save_pretrained(tmp_path / "tied")
    AutoTokenizer.from_pretrained(model_path).save_pretrained(tmp_path / "tied")
    policy = TorchPolicyBackend(tmp_path / "tied", ActorConfig(), lora=LoraConfig(rank=2, merge_on_save=True))
    policy.save_pretrained(tmp_path / "merged")
    assert "lm_head.weight" not in load_file(tmp_path / "merged" / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_an_adapter_of_another_base_or_without_a_layer_is_refused(model_path, saved, tmp_path):
    lora, model = saved
    model.save_pretrained(str(tmp_path))
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    options = replace(lora, adapter_path=str(tmp_path))
    one = "model.layers.1.self_attn.q_proj"
    save_file({name: tensor for name, tensor in tensors.items() if one not in name}, file)
    with pytest.raises(ConfigError, match=rf"no tensors \({one}\).*LoraConfig.exclude"):
        policy_of(model_path, options)
    name = f"base_model.model.{one}.lora_A.weight"
    save_file(tensors | {name: torch.zeros(lora.rank, 3)}, file)
    with pytest.raises(ConfigError, match=rf"{one} for a weight of \(\d+, 3\), and the base model's is"):
        policy_of(model_path, options)


def critic_adapter(model_path, folder, model=AutoModelForTokenClassification, labels=1, **settings):
    """Options with the path of an adapter with random weights, head included, and peft's model."""
    kind = "TOKEN_CLS" if model is AutoModelForTokenClassification else "SEQ_CLS"
    lora = LoraConfig(rank=3, alpha=6, target_modules=("q_proj", "down_proj"), adapter_path=str(folder), **settings)
    made = peft.LoraConfig(r=3, lora_alpha=6, target_modules=list(lora.targets()), task_type=kind, **settings)
    adapted = peft.get_peft_model(model.from_pretrained(model_path, num_labels=labels), made).eval()
    torch.manual_seed(1)
    for name, weight in adapted.named_parameters():
        if "lora_B" in name or "score.modules_to_save" in name:
            torch.nn.init.normal_(weight, std=0.5)
    adapted.save_pretrained(str(folder))
    return lora, adapted


def critic_of(path, lora):
    return TorchCriticBackend(path, CriticConfig(use_lora=True), lora=lora, rollout_n=1, seed=3)


def hidden_states(adapted, batch):
    tokens = token_batch(batch, 0)
    with torch.no_grad():
        return tokens.read(adapted.base_model.model.base_model(**tokens.inputs).last_hidden_state)


@pytest.mark.parametrize("use_dora", [False, True])
def test_values_of_a_critic_are_the_logits_of_pefts_model_for_tokens(model_path, training_batch, tmp_path, use_dora):
    lora, theirs = critic_adapter(model_path, tmp_path / "value", use_dora=use_dora)
    critic, batch = critic_of(model_path, lora), training_batch(policy_of(model_path, LoraConfig()))
    expected = logits(theirs, batch).squeeze(-1)
    values = torch.tensor(critic.compute_values(batch).ragged("values").values)
    assert expected.std() > 1e-2
    assert apart(values, expected) < 1e-5


def test_a_head_of_a_sequence_classifier_has_no_bias(model_path, training_batch, tmp_path):
    lora, theirs = critic_adapter(model_path, tmp_path / "value", AutoModelForSequenceClassification)
    critic, batch = critic_of(model_path, lora), training_batch(policy_of(model_path, LoraConfig()))
    head = theirs.base_model.model.score.modules_to_save["default"].weight
    expected = hidden_states(theirs, batch) @ head[0].detach()
    assert apart(torch.tensor(critic.compute_values(batch).ragged("values").values), expected) < 1e-5


def test_a_critic_that_starts_from_the_adapter_of_a_policy_has_a_new_head(model_path, saved, training_batch):
    lora, theirs = saved
    critic, batch = critic_of(model_path, lora), training_batch(policy_of(model_path, LoraConfig()))
    assert not critic.compute_values(batch).ragged("values").values.any()
    torch.nn.init.ones_(critic._model.head.weight)
    expected = hidden_states(theirs, batch).sum(-1)
    assert apart(torch.tensor(critic.compute_values(batch).ragged("values").values), expected) < 1e-5


def test_a_head_of_several_labels_is_refused(model_path, tmp_path):
    lora, _ = critic_adapter(model_path, tmp_path / "value", labels=2)
    with pytest.raises(ConfigError, match=r"score must have a weight of \(1, \d+\).*one label.*got .*\(2, \d+\)"):
        critic_of(model_path, lora)
    with pytest.raises(ConfigError, match="modules_to_save"):
        policy_of(model_path, lora)
