"""Megatron-Core against transformers and peft: base, adapters, export and import, over layouts, families and kinds of adapter."""

from __future__ import annotations

import itertools

import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

FAMILIES = ("llama", "qwen2", "qwen3")
GRID = [*itertools.product(("one", "tp2", "pp2"), FAMILIES, ("fused", "canonical"))]
TOLERANCE = 1e-4


@pytest.fixture(scope="session")
def program():
    """The program's module, for its batches."""
    import importlib.util
    from pathlib import Path

    spec = importlib.util.spec_from_file_location("megatron_program", Path(__file__).with_name("megatron_program.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def logits(model, batch):
    """[T, vocab] of the response tokens, one row at a time: no padding, no batching."""
    found = []
    for prompt, response in zip(batch.ragged("prompts").rows(), batch.ragged("responses").rows(), strict=True):
        ids = torch.tensor([*prompt, *response])[None]
        with torch.no_grad():
            found.append(model(ids).logits[0, len(prompt) - 1 : -1])
    return torch.cat(found).numpy()


def load(runs, layout, family, kind):
    return dict(np.load(runs / layout / f"{family}-{kind}.npz"))


@pytest.mark.parametrize(("layout", "family", "kind"), GRID)
def test_logits_equal_transformers(runs, models, program, layout, family, kind):
    found = load(runs, layout, family, kind)
    want = logits(AutoModelForCausalLM.from_pretrained(models / family).eval(), program.batch_of(5, 99))
    assert np.abs(want).max() > 1
    assert np.abs(found["base"] - want).max() < TOLERANCE
    assert np.abs(found["fresh"] - want).max() < TOLERANCE
    assert np.array_equal(found["off"], found["base"])


@pytest.mark.parametrize(("layout", "family", "kind"), GRID)
def test_an_exported_adapter_is_the_same_in_peft_and_comes_back_bit_equal(runs, models, program, layout, family, kind):
    found = load(runs, layout, family, kind)
    base = AutoModelForCausalLM.from_pretrained(models / family)
    adapted = peft.PeftModel.from_pretrained(base, runs / layout / f"{family}-{kind}").eval()
    assert np.abs(found["trained"] - found["base"]).max() > 0.1
    assert np.abs(found["trained"] - logits(adapted, program.batch_of(5, 99))).max() < TOLERANCE
    assert bool(found["reread"])


@pytest.mark.parametrize(("layout", "family", "kind"), GRID)
def test_merged_weights_are_the_policy_and_unmerged_ones_are_as_before(runs, models, program, layout, family, kind):
    found = load(runs, layout, family, kind)
    assert np.abs(found["merged"] - found["trained"]).max() < TOLERANCE
    assert bool(found["unmerged"])
    weights = {name: torch.from_numpy(w) for name, w in np.load(runs / layout / f"{family}-{kind}-weights.npz").items()}
    model = AutoModelForCausalLM.from_pretrained(models / family)
    changed = {name.split(".")[-2] for name, w in weights.items() if not torch.equal(w, model.state_dict()[name])}
    assert changed == set(program.TARGETS[kind])
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert set(missing) <= {"lm_head.weight"} if family == "qwen2" else not missing
    assert not unexpected
    assert np.abs(logits(model.eval(), program.batch_of(5, 99)) - found["trained"]).max() < TOLERANCE


@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_ten_steps_are_the_same_however_ranks_share_the_work(runs, layout, family):
    one, many = (np.load(runs / name / f"curve-{family}.npz") for name in ("one", layout))
    assert np.ptp(one["actor/loss"]) > 0.1
    for name in one.files:
        assert np.abs(many[name] - one[name]).max() < TOLERANCE, name
