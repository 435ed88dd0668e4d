"""Snapshots are restored bit for bit, or refused with the field that does not fit."""

from __future__ import annotations

import json

import pytest

from rl_megatron_peft import (
    AdapterError,
)


def edit_state(folder, **fields):
    file = folder / "adapter_state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def without_a_tensor(folder):
    from safetensors.torch import load_file, save_file

    (file,) = folder.glob("stage-*.safetensors")
    tensors = load_file(file)
    del tensors["model.layers.0.mlp.down_proj.lora_A"]
    save_file(tensors, file)


@pytest.fixture
def whole(ranks, models, program):
    return program.policy_of(models / "even", ranks, "whole")


@pytest.mark.parametrize(
    ("damage", "field"),
    [
        (lambda folder: edit_state(folder, base_model="f00"), "base_model"),
        (lambda folder: edit_state(folder, rank=8), "rank"),
        (lambda folder: edit_state(folder, updates=None), "updates"),
        (lambda folder: (folder / "adapter_state.json").write_text("[]"), "base_model"),
        (lambda folder: (folder / "adapter_state.json").unlink(), "file"),
        (lambda folder: [file.write_bytes(b"\x08" + bytes(9)) for file in folder.glob("stage-*")], "file"),
        (without_a_tensor, "model.layers.0.mlp.down_proj.lora_A"),
    ],
)
def test_a_snapshot_that_can_not_be_restored_is_refused(policy, ranks, models, program, tmp_path, damage, field):
    trained = program.policy_of(models / "llama", ranks, "fused")
    trained.update(program.batch_of(4, 0), temperature=1.0)
    assert all(file.is_file() for file in trained.snapshot()(tmp_path))
    before = program.factors_of(policy)
    policy.restore(tmp_path)
    assert program.same_state(policy, trained)
    fresh = program.policy_of(models / "llama", ranks, "fused")
    damage(tmp_path)
    with pytest.raises(AdapterError) as caught:
        fresh.restore(tmp_path)
    assert caught.value.field == field
    assert program.factors_of(fresh) == before


def test_a_whole_policy_restores_its_snapshot_and_refuses_that_of_an_adapter(
    whole, policy, ranks, models, program, tmp_path
):
    whole.update(program.batch_of(4, 0), temperature=1.0)
    whole.snapshot()(tmp_path)
    again = program.policy_of(models / "even", ranks, "whole")
    again.restore(tmp_path)
    assert program.same_state(whole, again)
    pairs = zip(whole.named_weights(), again.named_weights(), strict=True)
    assert all(a.data.tobytes() == b.data.tobytes() for a, b in pairs)
    with pytest.raises(AdapterError, match="base_model"):
        policy.restore(tmp_path)
    adapted = program.policy_of(models / "even", ranks, "fused")
    with pytest.raises(AdapterError, match="rank is not the model's 3"):
        adapted.restore(tmp_path)
    adapted.snapshot()(tmp_path)
    with pytest.raises(AdapterError, match="trained is not the model's 'all weights'"):
        whole.restore(tmp_path)
