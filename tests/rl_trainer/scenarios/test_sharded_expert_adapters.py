"""LoRA on experts whose weights FSDP2 shards: two ranks learn what plain torch does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import peft
import pytest
from transformers import AutoModelForCausalLM

PROGRAM = Path(__file__).parents[1] / "programs" / "expert_adapters_program.py"
SCENARIOS = ("all", "packed_recomputed", "unsharded_after_forward")
pytestmark = pytest.mark.slow  # two ranks


@pytest.fixture(scope="module")
def runs(moe_model, tmp_path_factory):
    """Folder with the results of the program."""
    out = tmp_path_factory.mktemp("experts")
    with (out / "log").open("w") as log:
        command = [sys.executable, str(PROGRAM), str(moe_model), str(out)]
        done = subprocess.run(command, stdout=log, stderr=log, timeout=400, check=False)
    assert done.returncode == 0, (out / "log").read_text()[-3000:]
    return out


def close(found, want):
    return np.abs(found - want).max() <= 1e-5 * np.abs(want).max()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_weights_and_gradients_after_three_updates_equal_those_of_torch(runs, scenario):
    one, other, plain = (dict(np.load(runs / folder / f"{scenario}.npz")) for folder in ("two/0", "two/1", "plain"))
    weights = [name for name in plain if name.startswith("weight/")]
    for name in weights:
        assert np.array_equal(one[name], other[name]), name
        assert close(one[name], plain[name]), name
    for update in range(3):
        norm = f"metric/{update}/actor/grad_norm"
        assert one[norm] == pytest.approx(plain[norm], rel=1e-5)
        assert one[norm] > 1e-3
    rows = {name: value for found in (one, other) for name, value in found.items() if name.startswith("row/")}
    assert rows.keys() == {name for name in plain if name.startswith("row/")}
    assert all(close(value, plain[name]) for name, value in rows.items())


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_peft_reads_what_two_ranks_save(runs, moe_model, scenario):
    """Merged by peft it is what the rollout gets; some experts have moved."""
    model = AutoModelForCausalLM.from_pretrained(moe_model)
    base = {name: weight.numpy().copy() for name, weight in model.state_dict().items()}
    saved = peft.PeftModel.from_pretrained(model, runs / "two" / "0" / f"checkpoint-{scenario}")
    sent = dict(np.load(runs / "two" / "0" / f"{scenario}.npz"))
    merged = {name: weight.numpy() for name, weight in saved.merge_and_unload().state_dict().items()}
    assert all(close(sent[f"weight/{name}"], weight) for name, weight in merged.items())
    assert any(not close(merged[name], weight) for name, weight in base.items() if ".experts." in name)


def test_compute_in_bfloat16_moves_experts_in_the_same_direction(runs, moe_model):
    exact, rounded = (dict(np.load(runs / "two" / "0" / f"{scenario}.npz")) for scenario in ("all", "bf16"))
    base = AutoModelForCausalLM.from_pretrained(moe_model).state_dict()
    experts = [name for name in base if ".experts." in name]
    assert len(experts) == 4
    for name in experts:
        one = exact[f"weight/{name}"] - base[name].numpy()
        other = rounded[f"weight/{name}"] - base[name].bfloat16().float().numpy()  # frozen weights are held in it
        assert not np.array_equal(one, other)
        assert (one * other).sum() > 0.99 * np.sqrt((one**2).sum() * (other**2).sum())
