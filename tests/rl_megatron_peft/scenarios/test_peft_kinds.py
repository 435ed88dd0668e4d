"""Every kind of adapter that peft saves gives peft's logits, or is refused with the field."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from rl_megatron_peft import AdapterError, read_adapter

# peft's warnings about unusual settings
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

SOME = {"r": 4, "lora_alpha": 10, "target_modules": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]}
ALL = {**SOME, "target_modules": "all-linear"}
HONORED = {
    "plain": SOME,
    "rslora": {**SOME, "use_rslora": True},
    "dora": {**SOME, "use_dora": True},
    "dora-rslora": {**SOME, "use_dora": True, "use_rslora": True},
    "rank_pattern": {**ALL, "rank_pattern": {"v_proj": 2, "layers.1.mlp.up_proj": 7, r"0\.self_attn\.[ko]_proj": 3}},
    "alpha_pattern": {**ALL, "alpha_pattern": {"v_proj": 3, r".*\.1\..*": 32}},
    "patterns-rslora": {**ALL, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 9}, "use_rslora": True},
    "patterns-dora": {**ALL, "rank_pattern": {"o_proj": 2}, "alpha_pattern": {"o_proj": 9}, "use_dora": True},
    "all-linear": ALL,
    "regex": {**SOME, "target_modules": r".*\.1\.(self_attn\.[qv]_proj|mlp\.\w+_proj)"},
    "full-names": {**SOME, "target_modules": ["model.layers.0.self_attn.q_proj", "1.mlp.down_proj"]},
    "layers_to_transform": {**SOME, "layers_to_transform": [1]},
    "layers_to_transform-one": {**SOME, "layers_to_transform": 0, "layers_pattern": "layers"},
    "layers_pattern": {**SOME, "layers_to_transform": [0, 1], "layers_pattern": ["h", "layers"]},
    "exclude_modules": {**SOME, "exclude_modules": ["layers.0.mlp.up_proj", "lm_head"]},
    "exclude-regex": {**ALL, "exclude_modules": r".*\.0\.mlp\..*"},
    "gaussian": {**SOME, "init_lora_weights": "gaussian"},
    "orthogonal": {**SOME, "init_lora_weights": "orthogonal"},
    "eva": {**SOME, "init_lora_weights": "eva", "eva_config": peft.EvaConfig()},
    "mica": {**SOME, "init_lora_weights": "mica"},
    "uninitialized": {**SOME, "init_lora_weights": False},
    "dropout": {**SOME, "lora_dropout": 0.5},
    "loftq_config-unused": {**SOME, "loftq_config": {"loftq_bits": 4}},
    "fan_in_fan_out": {**SOME, "fan_in_fan_out": True},  # peft resets it for torch.nn.Linear
}
ATTENTION = {"r": 4, "lora_alpha": 10, "target_modules": ["q_proj", "v_proj"]}
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
OF_EXPERTS = {
    "plain": {**ATTENTION, "target_parameters": BOTH},
    "rslora": {**ATTENTION, "target_parameters": BOTH, "use_rslora": True},
    "experts-alone": {**ATTENTION, "target_modules": [], "target_parameters": ["experts.down_proj"]},
    "short-names": {**ATTENTION, "target_parameters": ["gate_up_proj", "down_proj"]},
    "one-layer": {**ATTENTION, "target_parameters": ["layers.1.mlp.experts.gate_up_proj"]},
    "each-layer": {
        **ATTENTION,
        "target_parameters": [
            "model.layers.0.mlp.experts.down_proj",
            *(f"model.layers.1.{name}" for name in BOTH),
        ],
    },
    "patterns": {
        **ATTENTION,
        "target_parameters": BOTH,
        "rank_pattern": {"experts.gate_up_proj": 2, "q_proj": 3},
        "alpha_pattern": {r"layers\.1\.mlp\.experts\.down_proj": 3},
    },
    "target_modules": {**ATTENTION, "target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]},
}
REFUSED = {
    "pissa": ({**SOME, "init_lora_weights": "pissa"}, "init_lora_weights", "path_initial_model_for_weight_conversion"),
    "pissa-fast": ({**SOME, "init_lora_weights": "pissa_niter_4"}, "init_lora_weights", "subtracts the first A and B"),
    "olora": ({**SOME, "init_lora_weights": "olora"}, "init_lora_weights", "path_initial_model_for_weight_conversion"),
    "alora": (
        {**SOME, "alora_invocation_tokens": [3, 4]},
        "alora_invocation_tokens",
        r"is \[3, 4\], which .* not supp",
    ),
    "bias-all": ({**SOME, "bias": "all"}, "bias", "is 'all'"),
    "bias-lora_only": ({**SOME, "bias": "lora_only"}, "bias", "is 'lora_only'"),
    "lora_bias": ({**SOME, "lora_bias": True}, "lora_bias", "is True"),
    "modules_to_save": ({**SOME, "modules_to_save": ["lm_head"]}, "modules_to_save", r"is \['lm_head'\]"),
    "trainable_tokens": ({**SOME, "trainable_token_indices": [1]}, "trainable_token_indices", r"is \[1\]"),
    "replication": ({**SOME, "layer_replication": [[0, 2], [1, 2]]}, "layer_replication", "is "),
    "lm_head": (
        {**SOME, "target_modules": ["q_proj", "embed_tokens"]},
        "target_modules",
        "Unknown module 'embed_tokens'",
    ),
}
OTHERS = {
    "IA3": lambda: peft.IA3Config(target_modules=["v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "LOHA": lambda: peft.LoHaConfig(target_modules=["v_proj"]),
    "LOKR": lambda: peft.LoKrConfig(target_modules=["v_proj"]),
    "ADALORA": lambda: peft.AdaLoraConfig(target_modules=["v_proj"], total_step=10),
    "OFT": lambda: peft.OFTConfig(target_modules=["v_proj"], r=2, oft_block_size=0),
    "VERA": lambda: peft.VeraConfig(target_modules=["v_proj"]),
    "PROMPT_TUNING": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
    "PREFIX_TUNING": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
}


@pytest.fixture
def base(models):
    """Return a function that loads a new model with biases, because peft changes its model."""
    return lambda: AutoModelForCausalLM.from_pretrained(models / "qwen2").eval()


def saved(config, base, folder):
    """Save an adapter with peft after changing each of its tensors."""
    model = peft.get_peft_model(base, config)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter += 0.3 * parameter.std().nan_to_num(1.0).clamp(min=0.3) * torch.randn(parameter.shape)
    model.save_pretrained(folder)
    return folder


def logits_in_peft(base, folder, batch):
    """Return the logits [T, vocab] of the response tokens, row by row."""
    model = peft.PeftModel.from_pretrained(base, folder).eval()
    found = []
    for prompt, response in zip(batch.ragged("prompts").rows(), batch.ragged("responses").rows(), strict=True):
        with torch.no_grad():
            found.append(model(torch.tensor([*prompt, *response])[None]).logits[0, len(prompt) - 1 : -1])
    return torch.cat(found).numpy()


def close(got, want):
    """Return whether logits are equal up to rounding, far below 1e-4 of the largest one."""
    return np.abs(got - want).max() < 1e-4 * np.abs(want).max()


def adapted_alone(adapter):
    """Return the settings of an adapter without names that `exclude` leaves no module of."""
    targets = adapter.config.target_modules
    if isinstance(targets, re.Pattern):
        return adapter.config
    kept = [name for name in targets if any(f".{module}".endswith(f".{name}") for module in adapter.pairs)]
    return dataclasses.replace(adapter.config, target_modules=tuple(kept))


def test_an_adapter_is_what_it_is_in_peft(base, models, ranks, program, tmp_path, subtests):
    batch = program.batch_of(5, 99)
    without = program.logits_of(program.policy_of(models / "qwen2", ranks, "whole"))
    for kind, settings in HONORED.items():
        with subtests.test(kind):
            folder = saved(peft.LoraConfig(task_type="CAUSAL_LM", **settings), base(), tmp_path / kind)
            adapter = read_adapter(folder)
            policy = program.policy_of(models / "qwen2", ranks, "canonical", lora=adapter.config)
            policy.load_adapter(folder)
            want = logits_in_peft(base(), folder, batch)
            assert not close(without, want)
            assert close(program.logits_of(policy), want)
            policy.save_pretrained(tmp_path / f"{kind}-again")
            assert close(logits_in_peft(base(), tmp_path / f"{kind}-again", batch), want)
            assert read_adapter(tmp_path / f"{kind}-again").config == adapted_alone(adapter)
            policy.load_adapter(tmp_path / f"{kind}-again")
            assert close(program.logits_of(policy), want)


@pytest.mark.filterwarnings("ignore:.*_pattern keys did not match:RuntimeWarning")  # they did
def test_an_adapter_of_experts_is_what_it_is_in_peft(moe_model, ranks, program, tmp_path, subtests):
    """With `target_modules` peft gives gate_up_proj twice the rank and scale."""
    batch = program.batch_of(5, 99)
    without = program.logits_of(program.policy_of(moe_model, ranks, "whole"))

    def base():
        return AutoModelForCausalLM.from_pretrained(moe_model).eval()

    for kind, settings in OF_EXPERTS.items():
        with subtests.test(kind):
            folder = saved(peft.LoraConfig(task_type="CAUSAL_LM", **settings), base(), tmp_path / kind)
            policy = program.policy_of(moe_model, ranks, "fused", lora=read_adapter(folder).config, fused=False)
            policy.load_adapter(folder)
            want = logits_in_peft(base(), folder, batch)[:, :15]
            assert not close(without, want)
            assert close(program.logits_of(policy), want)
            policy.save_pretrained(tmp_path / f"{kind}-again")
            assert close(logits_in_peft(base(), tmp_path / f"{kind}-again", batch)[:, :15], want)
            one, other = (
                load_file(path / "adapter_model.safetensors") for path in (folder, tmp_path / f"{kind}-again")
            )
            assert one.keys() == other.keys()
            assert all(one[key].equal(other[key]) for key in one)


def test_an_adapter_of_experts_that_would_not_be_what_it_is_in_peft_is_refused(moe_model, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(moe_model)
    folder = saved(peft.LoraConfig(**ATTENTION, target_parameters=BOTH), model, tmp_path / "a")
    file = folder / "adapter_config.json"
    fields = json.loads(file.read_text())
    for changes, field, message in (
        ({"target_modules": r".*\.[qv]_proj"}, "target_parameters", "regular expression; list the modules"),
        (
            {"target_parameters": BOTH[:1]},
            "model.layers.0.mlp.experts.base_layer",
            "targets in its layer are .*gate_up",
        ),
        (
            {"target_parameters": ["mlp.gate_up_proj"]},
            "target_parameters",
            "names 'mlp.gate_up_proj', which this reader",
        ),
        ({"r": 3}, r"model.layers.0.mlp.experts.down_proj.lora_A", "dimension 0 must be a multiple of 3"),
        ({"use_dora": True}, r"model.layers.0.mlp.experts.down_proj.lora_magnitude_vector", "is missing"),
        ({"exclude_modules": ["up_proj"]}, "model.layers.0.mlp.experts", "must take all of gate_proj, up_proj"),
    ):
        file.write_text(json.dumps(fields | changes))
        with pytest.raises(AdapterError, match=message) as caught:
            read_adapter(folder)
        assert caught.value.field == field


@pytest.mark.parametrize("kind", REFUSED)
def test_an_adapter_that_would_not_be_what_it_is_in_peft_is_refused(base, tmp_path, kind):
    settings, field, message = REFUSED[kind]
    folder = saved(peft.LoraConfig(task_type="CAUSAL_LM", **settings), base(), tmp_path / "a")
    with pytest.raises(AdapterError, match=message) as caught:
        read_adapter(folder)
    assert (caught.value.file, caught.value.field) == (str(folder / "adapter_config.json"), field)


@pytest.mark.parametrize("kind", OTHERS)
def test_other_methods_are_refused_by_their_type(base, tmp_path, kind):
    peft.get_peft_model(base(), OTHERS[kind]()).save_pretrained(tmp_path)
    with pytest.raises(AdapterError, match=f"peft_type must be 'LORA'; got '{kind}'"):
        read_adapter(tmp_path)


@pytest.mark.parametrize("kind", ["pissa", "olora"])
def test_adapters_of_a_changed_base_are_read_once_peft_has_converted_them(base, models, ranks, program, tmp_path, kind):
    """Follows the README's steps for an adapter whose initial values were not kept."""
    folder = saved(peft.LoraConfig(**SOME, init_lora_weights=kind), base(), tmp_path / "a")
    want = logits_in_peft(base(), folder, program.batch_of(5, 99))

    config = peft.PeftConfig.from_pretrained(folder)
    first = peft.get_peft_model(base(), config)
    first.peft_config["default"].init_lora_weights = True
    first.save_pretrained(tmp_path / "first")
    trained = peft.PeftModel.from_pretrained(base(), folder)
    trained.save_pretrained(tmp_path / "plain", path_initial_model_for_weight_conversion=tmp_path / "first")

    adapter = read_adapter(tmp_path / "plain")
    assert adapter.config.rank == 2 * SOME["r"]
    policy = program.policy_of(models / "qwen2", ranks, "canonical", lora=adapter.config)
    policy.load_adapter(tmp_path / "plain")
    assert close(program.logits_of(policy), want)


def edited(folder, **fields):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return folder


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"init_lora_weights": "corda"}, "init_lora_weights", "subtracts the first A and B"),
        ({"init_lora_weights": "lora_ga"}, "init_lora_weights", "subtracts the first A and B"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights", "merge_and_unload"),
        (
            {"init_lora_weights": "later"},
            "init_lora_weights",
            "is 'later', an initialization this reader does not know",
        ),
        ({"init_lora_weights": 3}, "init_lora_weights", "is 3"),
        ({"target_parameters": ["mlp.experts"]}, "target_parameters", "does not support"),
        ({"use_qalora": True}, "use_qalora", "does not support"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora", "does not support"),
        ({"arrow_config": {"top_k": 3}}, "arrow_config", "does not support"),
        ({"field_of_a_later_peft": 16}, "field_of_a_later_peft", "is 16, which this reader does not support"),
        ({"layers_to_transform": [5]}, r"model\.layers\..*", "has an adapter, but target_modules is"),
        ({"layers_to_transform": [-1]}, "layers_to_transform", "layer numbers from 0"),
        (
            {"layers_to_transform": [0], "layers_pattern": "h"},
            "layers_to_transform",
            "leaves no module of target_modules",
        ),
        ({"layers_to_transform": [0], "target_modules": "all-linear"}, "layers_to_transform", "regular expression"),
        ({"target_modules": "("}, "target_modules", "not a regular expression"),
        ({"rank_pattern": {"(": 2}}, "rank_pattern", "not a regular expression"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern", "an integer >= 1"),
        ({"alpha_pattern": {"q_proj": math.inf}}, "alpha_pattern", "finite number above 0"),
        ({"rank_pattern": {"v_proj": 2}}, r".*v_proj\.lora_A", "but r is 2"),
    ],
)
def test_settings_that_can_not_be_honored_are_refused_by_field(base, tmp_path, fields, field, message):
    folder = edited(saved(peft.LoraConfig(**SOME), base(), tmp_path), **fields)
    with pytest.raises(AdapterError, match=message) as caught:
        read_adapter(folder)
    assert re.fullmatch(field, caught.value.field)


def test_fields_of_a_later_peft_that_are_not_used_are_read(base, tmp_path):
    folder = saved(peft.LoraConfig(**SOME), base(), tmp_path)
    before = read_adapter(folder)
    assert read_adapter(edited(folder, new_config=None, use_new=False, new_list=[], new_map={})).config == before.config


def test_the_first_pattern_that_matches_counts_also_in_a_written_folder(base, models, ranks, program, tmp_path):
    """peft sorts the patterns when it saves them."""
    folder = saved(peft.LoraConfig(**ALL, rank_pattern={"q_proj": 2, "1.self_attn.q_proj": 2}), base(), tmp_path / "a")
    folder = edited(folder, alpha_pattern={"q_proj": 3, "1.self_attn.q_proj": 100})
    want = logits_in_peft(base(), folder, program.batch_of(5, 99))
    policy = program.policy_of(models / "qwen2", ranks, "canonical", lora=read_adapter(folder).config)
    policy.load_adapter(folder)
    assert close(program.logits_of(policy), want)
    policy.save_pretrained(tmp_path / "again")
    assert close(logits_in_peft(base(), tmp_path / "again", program.batch_of(5, 99)), want)


def test_a_pickled_adapter_is_refused_with_the_way_to_convert_it(base, tmp_path):
    (tmp_path / "a").mkdir()
    model = peft.get_peft_model(base(), peft.LoraConfig(**SOME))
    model.save_pretrained(tmp_path / "a")
    torch.save({}, tmp_path / "a" / "adapter_model.bin")
    read_adapter(tmp_path / "a")  # like peft, reads the safetensors file if both exist
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterError, match=r"adapter_model\.bin: file is a pickle.*save_pretrained\(new_folder\)"):
        read_adapter(tmp_path / "a")


@pytest.mark.parametrize("use_dora", [False, True])
def test_a_critic_has_the_values_of_pefts_model_for_tokens(models, ranks, program, tmp_path, use_dora):
    settings = peft.LoraConfig(task_type="TOKEN_CLS", **SOME, use_dora=use_dora)
    model = AutoModelForTokenClassification.from_pretrained(models / "qwen2", num_labels=1)
    theirs = peft.get_peft_model(model, settings).eval()
    torch.manual_seed(1)
    for name, weight in theirs.named_parameters():
        if "lora_B" in name or "score.modules_to_save" in name:
            torch.nn.init.normal_(weight, std=0.5)
    theirs.save_pretrained(str(tmp_path))
    batch, want = program.batch_of(5, 99), list[torch.Tensor]()
    for prompt, response in zip(batch.ragged("prompts").rows(), batch.ragged("responses").rows(), strict=True):
        with torch.no_grad():
            values = theirs(torch.tensor([*prompt, *response])[None]).logits[0, len(prompt) - 1 : -1, 0]
        want.append(values)
    adapter = read_adapter(tmp_path, value_head=True)
    critic = program.critic_of(models / "qwen2", ranks, "canonical", lora=adapter.config)
    critic.load_adapter(tmp_path)
    assert close(program.values_of(critic), torch.cat(want).numpy())
    with pytest.raises(AdapterError, match="modules_to_save"):
        read_adapter(tmp_path)


def test_a_head_of_another_model_is_refused(models, ranks, program, tmp_path):
    settings = peft.LoraConfig(task_type="TOKEN_CLS", **SOME)
    model = AutoModelForTokenClassification.from_pretrained(models / "qwen2", num_labels=2)
    peft.get_peft_model(model, settings).save_pretrained(str(tmp_path))
    adapter = read_adapter(tmp_path, value_head=True)
    critic = program.critic_of(models / "qwen2", ranks, "canonical", lora=adapter.config)
    with pytest.raises(AdapterError, match=r"score\.bias has shape \(2,\); expected \(1,\)") as caught:
        critic.load_adapter(tmp_path)
    assert caught.value.field == "base_model.model.score.bias"
