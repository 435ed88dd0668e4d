"""A run that was stopped goes on as if it had not been: the same weights, bit by bit, from the newest whole checkpoint."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from resumable_run import SCENARIOS, Run

from rl_trainer.checkpoints.folder import Checkpoint, inspect, step_name


def same(a, b):
    assert a.keys() == b.keys()
    return all(np.array_equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_and_two_steps_equal_four_bit_by_bit(model_path, tmp_path, scenario):
    torch.manual_seed(3)
    straight = Run(model_path, None, steps=4, **SCENARIOS[scenario])
    straight.fit()
    torch.manual_seed(3)
    first = Run(model_path, tmp_path, steps=2, **SCENARIOS[scenario])
    first.fit()
    torch.manual_seed(4)  # adapters draw their dropout from here
    second = Run(model_path, tmp_path, steps=4, **SCENARIOS[scenario])
    second.fit()
    assert not same(first.weights(), second.weights())
    assert same(straight.weights(), second.weights())
    assert sorted(second.metrics) == [3, 4]
    untimed = {k: v for k, v in straight.metrics[4].items() if not k.startswith(("timing", "perf", "checkpoint"))}
    assert untimed == {k: second.metrics[4][k] for k in untimed}


def test_a_checkpoint_is_whole_and_its_policy_loads(model_path, tmp_path):
    from transformers import AutoModelForCausalLM

    run = Run(model_path, tmp_path, steps=2, estimator="gae")
    run.fit()
    found = inspect(tmp_path / step_name(2))
    assert isinstance(found, Checkpoint)
    names = {name for name in found.manifest.files if not name.startswith("hf/")}
    assert names == {
        "config.yaml",
        "trainer.json",
        "reward/worker.json",
        *(f"{role}/rank-00000-of-00001.{kind}" for role in ("actor", "critic") for kind in ("json", "safetensors")),
    }
    assert (found.run_state.step, found.run_state.version, found.run_state.critic_updates) == (2, 1, 2)
    assert found.run_state.prompts_taken == 8
    loaded = AutoModelForCausalLM.from_pretrained(found.folder / "hf").state_dict()
    weights = run.weights()
    assert all(np.array_equal(weights[name], tensor.numpy()) for name, tensor in loaded.items())
