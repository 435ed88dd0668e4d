"""Megatron-Core equals transformers and peft, over layouts, families and kinds of adapters."""

from __future__ import annotations

import itertools

import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

SOME = {("llama", "fused"), ("qwen2", "canonical"), ("qwen3", "fused"), ("qwen2", "fused-dora")}
LAYOUTS = ("one", "tp2", "pp2", "tp2pp2")
GRID = list(itertools.product(LAYOUTS, ("llama", "qwen2", "qwen3"), ("fused", "canonical")))
GRID += [(layout, *dora) for layout in LAYOUTS for dora in (("qwen2", "fused-dora"), ("llama", "canonical-dora"))]
TOLERANCE = 1e-4


# The tests read the results of processes in several layouts.


def cases(*layouts, more=()):
    """Parameters (fixture, layout) for CI, and for the nightly suite."""
    return [
        *(pytest.param("runs", layout, marks=pytest.mark.slow) for layout in layouts),
        *(pytest.param("more_runs", layout, marks=pytest.mark.nightly) for layout in more),
    ]


@pytest.fixture(
    params=[
        pytest.param(case, marks=pytest.mark.slow if case[1:] in SOME else pytest.mark.nightly, id="-".join(case))
        for case in GRID
    ]
)
def case(request):
    """(folder of the layout, family, kind of adapter)."""
    layout, family, kind = request.param
    return request.getfixturevalue("runs" if (family, kind) in SOME else "more_runs") / layout, family, kind


def logits(model, batch):
    """Return the logits [T, vocab] of the response tokens, one unpadded row at a time."""
    found = []
    for prompt, response in zip(batch.ragged("prompts").rows(), batch.ragged("responses").rows(), strict=True):
        ids = torch.tensor([*prompt, *response])[None]
        with torch.no_grad():
            found.append(model(ids).logits[0, len(prompt) - 1 : -1])
    return torch.cat(found).numpy()


def test_logits_equal_transformers(case, models, program):
    folder, family, kind = case
    found = np.load(folder / f"{family}-{kind}.npz")
    want = logits(AutoModelForCausalLM.from_pretrained(models / family).eval(), program.batch_of(5, 99))
    assert np.abs(want).max() > 1
    assert np.abs(found["base"] - want).max() < TOLERANCE
    assert np.abs(found["fresh"] - want).max() < TOLERANCE
    assert np.array_equal(found["off"], found["base"])


def test_an_exported_adapter_is_the_same_in_peft_and_comes_back_bit_equal(case, models, program):
    folder, family, kind = case
    found = np.load(folder / f"{family}-{kind}.npz")
    base = AutoModelForCausalLM.from_pretrained(models / family)
    adapted = peft.PeftModel.from_pretrained(base, folder / f"{family}-{kind}").eval()
    assert np.abs(found["trained"] - found["base"]).max() > 0.1
    assert np.abs(found["trained"] - logits(adapted, program.batch_of(5, 99))).max() < TOLERANCE
    assert bool(found["reread"])


def test_merged_weights_are_the_policy_and_unmerged_ones_are_as_before(case, models, program):
    folder, family, kind = case
    found = np.load(folder / f"{family}-{kind}.npz")
    assert np.abs(found["merged"] - found["trained"]).max() < TOLERANCE
    assert bool(found["unmerged"])
    weights = {name: torch.from_numpy(w) for name, w in np.load(folder / f"{family}-{kind}-weights.npz").items()}
    model = AutoModelForCausalLM.from_pretrained(models / family)
    changed = {name.split(".")[-2] for name, w in weights.items() if not torch.equal(w, model.state_dict()[name])}
    assert changed == set(program.TARGETS[kind])
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert set(missing) <= {"lm_head.weight"} if family == "qwen2" else not missing
    assert not unexpected
    assert np.abs(logits(model.eval(), program.batch_of(5, 99)) - found["trained"]).max() < TOLERANCE


def check_same_curve(folder, layout, family):
    one, many = (np.load(folder / name / f"curve-{family}.npz") for name in ("one", layout))
    assert np.ptp(one["actor/loss"]) > 0.1
    for name in one.files:
        assert np.abs(many[name] - one[name]).max() < TOLERANCE, name


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2", "zero2", "sp2", "tp2pp2"])
def test_ten_steps_are_the_same_however_ranks_share_the_work(runs, layout):
    check_same_curve(runs, layout, "qwen2")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "pp2", "sp2", "tp2pp2"])
def test_what_dropout_drops_does_not_depend_on_how_a_model_is_cut(runs, layout):
    check_same_curve(runs, layout, "qwen3")


@pytest.mark.parametrize(
    ("fixture", "layout"),
    cases("tp2", "pp2", "dp2", "zero2", "sp2", "tp2pp2", more=("sp2pp2", "zero2tp2")),
)
def test_training_all_weights_is_the_same_however_ranks_share_the_work(request, fixture, layout):
    """Includes norms with partial gradients: query and key norms; all with sequence parallelism."""
    check_same_curve(request.getfixturevalue(fixture), layout, "even")


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2", "zero2", "sp2", "tp2pp2", "sp2pp2", "zero2tp2"])
def test_dora_is_trained_the_same_however_ranks_share_the_work(more_runs, layout):
    """Includes linear_proj and linear_fc2: each tensor-parallel rank has a part of every row."""
    check_same_curve(more_runs, layout, "qwen3")


def check_resumed(folder, family):
    """Check runs resumed from the previous layout's Megatron checkpoint and trainer snapshot."""
    ten, *resumed = (np.load(folder / f"{name}-{family}.npz") for name in ("curve", "resumed", "restored"))
    for name in ten.files:
        for again in resumed:
            assert np.abs(ten[name][5:] - again[name]).max() < TOLERANCE, name


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one", "tp2", "pp2", "dp2", "zero2", "tp2pp2"])
@pytest.mark.parametrize("family", ["qwen2", "even"])
def test_five_steps_and_five_of_a_resumed_run_equal_ten(runs, layout, family):
    """Each layout resumes from the checkpoint of the one before it in this list."""
    check_resumed(runs / layout, family)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["one", "tp2", "pp2", "dp2", "zero2", "tp2pp2", "zero2tp2"])
@pytest.mark.parametrize("family", ["qwen3", "even"])
def test_dora_of_canonical_adapters_and_whole_models_resume_as_well(more_runs, layout, family):
    check_resumed(more_runs / layout, family)
