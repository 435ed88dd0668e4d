"""A Qwen3-MoE model on Megatron-Core equals transformers', under any layout of its experts."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import peft
import pytest
import torch
from relative import apart
from safetensors.numpy import load_file
from shared_folders import made_once
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rl_protocol.routed_tokens import experts_of

pytestmark = pytest.mark.slow  # the tests read the results of processes in several layouts
LAYOUTS = ("one", "ep2", "sp2", "ep2pp2", "ep2dp4")
PROGRAM = Path(__file__).parents[1] / "experts_program.py"


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Folder with a model in `model` and the results of the program."""

    def make(out):
        config = Qwen3MoeConfig(
            vocab_size=16,
            hidden_size=32,
            moe_intermediate_size=12,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=12,
            num_experts=4,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            max_position_embeddings=64,
            initializer_range=0.3,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(config).save_pretrained(out / "model")
        save_adapter(out / "model", out / "start")
        with (out / "log").open("w") as log:
            command = [sys.executable, str(PROGRAM), str(out / "model"), str(out)]
            done = subprocess.run(command, stdout=log, stderr=log, timeout=800, check=False)
        assert done.returncode == 0, (out / "log").read_text()[-4000:]

    return made_once(tmp_path_factory, "megatron_experts", make)


def save_adapter(model, folder):
    """Save an adapter of the attention and of the experts with peft, whose B are not zero."""
    settings = peft.LoraConfig(
        r=3,
        lora_alpha=6,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model), settings)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    adapted.save_pretrained(folder)


def in_peft(folder, adapter, *, trained=False):
    """The model with an adapter, as peft reads it."""
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    return peft.PeftModel.from_pretrained(base, folder / adapter, is_trainable=trained).eval()


def logits(model, batch):
    """Return the logits [T, 15] of the response tokens, one unpadded row at a time."""
    found = []
    for prompt, response in zip(batch.ragged("prompts").rows(), batch.ragged("responses").rows(), strict=True):
        with torch.no_grad():
            ids = torch.tensor([*prompt, *response])[None]
            found.append(model(ids).logits[0, len(prompt) - 1 : -1, :15])
    return torch.cat(found).numpy()


def close(found, want):
    return np.abs(found - want).max() < 1e-4 * np.abs(want).max()


@pytest.fixture(params=LAYOUTS)
def layout(request, made):
    """(folder, name) of the results of a layout."""
    return made, request.param


def test_logits_equal_transformers_and_exported_weights_are_those_that_were_loaded(layout, program):
    folder, name = layout
    want = logits(AutoModelForCausalLM.from_pretrained(folder / "model").eval(), program.batch_of(5, 99))
    assert np.abs(want).max() > 1
    assert close(np.load(folder / f"{name}.npz")["base"], want)
    weights, loaded = np.load(folder / f"{name}-weights.npz"), load_file(folder / "model" / "model.safetensors")
    assert set(weights) == set(loaded)
    assert all(np.array_equal(weights[key], loaded[key]) for key in loaded)


def given_experts(router, hidden, experts):
    """Logits, weights and numbers of these experts, as transformers' router returns them."""
    logits = torch.nn.functional.linear(hidden.reshape(-1, router.hidden_dim), router.weight)
    return logits, torch.softmax(logits.gather(-1, experts), -1), experts


def test_given_experts_compute_what_they_do_in_transformers(layout, program):
    """The log-probs of rows with experts, and of one without, under each layout."""
    folder, name = layout
    sys.path.insert(0, str(PROGRAM.parent))
    from experts_program import routed_batch

    model, batch = AutoModelForCausalLM.from_pretrained(folder / "model").eval(), routed_batch()
    want = []
    columns = zip(*(batch.ragged(key).rows() for key in ("prompts", "responses")), experts_of(batch), strict=True)
    for prompt, response, experts in columns:
        routers = [layer.mlp.gate for layer in model.model.layers]
        for number, router in enumerate(routers if experts.shape[1] else ()):
            given = torch.from_numpy(experts[:, number].astype(np.int64))
            router.forward = partial(given_experts, router, experts=given)
        with torch.no_grad():
            out = model(torch.tensor([*prompt, *response])[None, :-1]).logits[0, len(prompt) - 1 :, :16]
        want += torch.log_softmax(out, -1).gather(-1, torch.tensor(response)[:, None])[:, 0].tolist()
        for router in routers:
            router.__dict__.pop("forward", None)
    found = np.load(folder / f"{name}.npz")["replayed"]
    assert apart(found, want) < 1e-5


def routed_by_transformers(model, batch):
    """The experts of each row [tokens, layers, K], ascending."""
    found = []
    for prompt, response in zip(batch.ragged("prompts").rows(), batch.ragged("responses").rows(), strict=True):
        with torch.no_grad():
            out = model(torch.tensor([*prompt, *response])[None, :-1], output_router_logits=True)
        found.append(torch.stack([layer.topk(2).indices for layer in out.router_logits], 1).sort(-1).values.numpy())
    return found


def test_recorded_experts_are_those_of_the_routers_or_those_given(layout, program):
    """R2, under each layout: of all tokens and layers. A row without given experts has the
    routers'."""
    folder, name = layout
    sys.path.insert(0, str(PROGRAM.parent))
    from experts_program import routed_batch

    model, found = AutoModelForCausalLM.from_pretrained(folder / "model").eval(), np.load(folder / f"{name}.npz")
    own = routed_by_transformers(model, program.batch_of(5, 99))
    given = experts_of(routed_batch())
    for key, want in (
        ("recorded", own),
        ("recorded_given", [one if one.shape[1] else own[row] for row, one in enumerate(given)]),
    ):
        got = found[key].reshape(-1, 2, 2)
        assert np.array_equal(np.sort(got, -1), np.sort(np.concatenate(want), -1)), key


def test_training_is_the_same_and_transformers_reads_what_is_saved(layout, program):
    folder, name = layout
    one, found = np.load(folder / "one.npz"), np.load(folder / f"{name}.npz")
    assert np.allclose(found["norms"], one["norms"], rtol=1e-4)
    assert np.abs(one["trained"] - one["base"]).max() > 1
    assert close(found["trained"], one["trained"])
    assert close(found["log_probs"], one["log_probs"])
    saved = AutoModelForCausalLM.from_pretrained(folder / name / "model").eval()
    assert close(logits(saved, program.batch_of(5, 99)), found["trained"])
    before, after = (load_file(path / "model.safetensors") for path in (folder / "model", folder / name / "model"))
    moved = [key for key in before if ".mlp." in key and not np.array_equal(before[key], after[key])]
    assert len(moved) == 2 * (1 + 3 * 4)  # routers and experts


def test_the_state_of_another_layout_continues(layout):
    found = np.load(layout[0] / f"{layout[1]}.npz")
    assert close(found["later"], found["trained"])
    if "resumed" in found:
        assert np.array_equal(found["resumed"], found["restored"])


def test_expert_parallel_ranks_hold_the_state_of_their_experts_alone(made):
    one, two = (np.load(made / f"{name}.npz")["bytes"] for name in ("one", "ep2"))
    experts = 8 * 2 * 4 * 3 * 12 * 32  # two float32 moments, layers, experts, matrices
    assert list(two) == [one[0] - experts // 2] * 2


def test_adapters_of_experts_compute_what_they_do_in_peft(layout, program):
    folder, name = layout
    found, batch = np.load(folder / f"{name}-adapted.npz"), program.batch_of(5, 99)
    base = logits(AutoModelForCausalLM.from_pretrained(folder / "model").eval(), batch)
    want = logits(in_peft(folder, "start"), batch)
    assert np.abs(want - base).max() > 1
    assert close(found["fresh"], base)
    assert close(found["start"], want)
    assert close(found["off"], base)
    assert close(found["merged"], want)


def test_merged_weights_of_experts_are_those_of_peft(layout):
    folder, name = layout
    found = np.load(folder / f"{name}-merged.npz")
    want = in_peft(folder, "start").merge_and_unload().state_dict()
    assert set(found) == set(load_file(folder / "model" / "model.safetensors"))
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        for parameter, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            rows = [np.concatenate([found[f"{prefix}.{e}.{part}.weight"] for part in parts]) for e in range(4)]
            assert apart(np.stack(rows), want[f"{prefix}.{parameter}"]) < 1e-5


def test_gradients_of_adapters_of_experts_are_those_of_peft(layout, program):
    """After the first step AdamW's first moments are a tenth of the clipped gradients."""
    folder, name = layout
    model, batch = in_peft(folder, "start", trained=True), program.batch_of(7, 0)
    taken, entropy = list[torch.Tensor](), list[torch.Tensor]()
    for prompt, response in zip(batch.ragged("prompts").rows(), batch.ragged("responses").rows(), strict=True):
        out = model(torch.tensor([*prompt, *response])[None, :-1]).logits[0, len(prompt) - 1 :, :16]
        log_p = torch.log_softmax(out, -1)
        taken.append(log_p.gather(-1, torch.tensor(response)[:, None])[:, 0])
        entropy.append(-(log_p.exp() * log_p).sum(-1))
    tokens = SimpleNamespace(tokens=int(batch.ragged("response_mask").values.sum()))
    program.loss(torch.cat(taken), torch.cat(entropy), batch, tokens)[0].backward()
    want = {key.replace(".default", ""): one.grad for key, one in model.named_parameters() if one.requires_grad}
    norm = float(np.load(folder / f"{name}-adapted.npz")["first_norm"])
    assert np.isclose(norm, float(torch.stack([one.square().sum() for one in want.values()]).sum().sqrt()), rtol=1e-4)
    found = np.load(folder / f"{name}-moments.npz")
    assert set(found) == set(want)
    assert len([key for key in want if ".experts." in key]) == 2 * 2 * 2
    for key, gradient in want.items():
        assert apart(found[key], 0.1 * min(1, 0.5 / norm) * gradient) < 1e-4, key


def test_adapters_of_experts_train_the_same_and_peft_reads_what_is_saved(layout, program):
    folder, name = layout
    one, found = np.load(folder / "one-adapted.npz"), np.load(folder / f"{name}-adapted.npz")
    assert np.allclose(found["norms"], one["norms"], rtol=1e-3)
    assert np.abs(one["adapted"] - one["start"]).max() > 1
    assert apart(found["adapted"], one["adapted"]) < 1e-3
    saved = logits(in_peft(folder, f"{name}/adapter"), program.batch_of(5, 99))
    assert close(saved, found["adapted"])


def test_the_state_of_adapters_of_experts_continues_in_another_layout(layout):
    found = np.load(layout[0] / f"{layout[1]}-adapted.npz")
    assert apart(found["later"], found["adapted"]) < 1e-3
    if "resumed" in found:
        assert np.array_equal(found["resumed"], found["restored"])
