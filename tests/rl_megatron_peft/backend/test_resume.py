"""Checkpoints that can't be resumed from are refused with file and field."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from traceback import StackSummary

import pytest

from rl_megatron_peft import (
    AdapterError,
    read_adapter,
)
from rl_protocol import OutputError


@pytest.fixture(scope="module")
def checkpoint(ranks, models, program, tmp_path_factory):
    """A checkpoint after one step."""
    from rl_megatron_peft.backend.resume import save_checkpoint

    policy = program.policy_of(models / "llama", ranks, "fused")
    policy.update(program.batch_of(4, 0), temperature=1.0)
    path = tmp_path_factory.mktemp("resume") / "step-1"
    save_checkpoint(policy, path)
    with pytest.raises(OutputError, match="exists; a checkpoint needs a new folder"):
        save_checkpoint(policy, path)
    assert [p.name for p in path.parent.iterdir()] == ["step-1"]
    return path


def test_a_checkpoint_that_can_not_be_written_leaves_nothing(policy, tmp_path, monkeypatch):
    """Megatron raises this on every rank if a file can't be written; it is no Exception."""
    from megatron.core import dist_checkpointing
    from torch.distributed.checkpoint import CheckpointException

    from rl_megatron_peft.backend.resume import save_checkpoint

    def full(state, folder):
        assert list(tmp_path.rglob("dist_ckpt")) == [Path(folder)]
        assert not (tmp_path / "step-1").exists()
        raise CheckpointException("write", {0: (RuntimeError("No space left on device"), StackSummary())})

    monkeypatch.setattr(dist_checkpointing, "save", full)
    with pytest.raises(OutputError, match=r"can't be written to .*step-1: No space left on device"):
        save_checkpoint(policy, tmp_path / "step-1")
    assert list(tmp_path.iterdir()) == []


def test_two_processes_save_one_checkpoint(policy, tmp_path, monkeypatch):
    """The second one to finish is refused, and neither writes into the files of the other."""
    from megatron.core import dist_checkpointing

    from rl_megatron_peft.backend.resume import load_checkpoint, save_checkpoint

    save = dist_checkpointing.save

    def with_another(state, folder):
        monkeypatch.setattr(dist_checkpointing, "save", save)
        save_checkpoint(policy, tmp_path / "step-1")
        assert list(Path(folder).iterdir()) == []
        save(state, folder)

    monkeypatch.setattr(dist_checkpointing, "save", with_another)
    with pytest.raises(OutputError, match=r"can't be written to .*step-1: .*not empty"):
        save_checkpoint(policy, tmp_path / "step-1")
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    load_checkpoint(policy, tmp_path / "step-1")


@pytest.mark.parametrize("path", [Path(), Path("/")])
def test_a_checkpoint_needs_a_name(policy, path):
    from rl_megatron_peft.backend.resume import save_checkpoint

    with pytest.raises(OutputError, match="exists; a checkpoint needs a new folder"):
        save_checkpoint(policy, path)


def test_a_checkpoint_that_can_not_be_read_is_refused(policy, checkpoint, monkeypatch):
    """Root may read every file, so the checksum fails instead."""
    from rl_megatron_peft.backend import resume
    from rl_megatron_peft.backend.resume import load_checkpoint

    def fails(file):
        raise OSError(5, "Input/output error", str(file))

    monkeypatch.setattr(resume, "_checksum", fails)
    with pytest.raises(AdapterError, match=r"dist_ckpt/\S+: file can't be read: Input/output error"):
        load_checkpoint(policy, checkpoint)


def edit_manifest(path, **fields):
    file = path / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def flip(path):
    file = max((path / "dist_ckpt").glob("*.distcp"), key=lambda file: file.stat().st_size)
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)


@pytest.mark.parametrize(
    ("damage", "field", "message"),
    [
        (lambda path: edit_manifest(path, rank=8), "rank", r"manifest.json: rank is 8, the model's is 3"),
        (lambda path: edit_manifest(path, base_model="f00"), "base_model", "base_model is 'f00'"),
        (lambda path: edit_manifest(path, fused=False), "fused", "fused is False"),
        (lambda path: edit_manifest(path, use_dora=True), "use_dora", "use_dora is True"),
        (lambda path: edit_manifest(path, steps=None), "steps", "steps is missing or not of type int"),
        (lambda path: edit_manifest(path, format="other"), "layout", "expected manifest.json of format"),
        (flip, "file", r"\.distcp: file does not match manifest.json"),
        (lambda path: (path / "dist_ckpt" / "common.pt").unlink(), "file", "common.pt: file does not match"),
        (lambda path: (path / "manifest.json").unlink(), "layout", "writing it did not finish"),
        (lambda path: (path / "manifest.json").write_text("{"), "layout", "expected manifest.json of format"),
    ],
)
def test_a_checkpoint_that_can_not_be_resumed_is_refused(policy, program, checkpoint, tmp_path, damage, field, message):
    from rl_megatron_peft.backend.resume import load_checkpoint

    shutil.copytree(checkpoint, tmp_path / "c")
    damage(tmp_path / "c")
    before = program.factors_of(policy)
    with pytest.raises(AdapterError, match=message) as caught:
        load_checkpoint(policy, tmp_path / "c")
    assert caught.value.file.startswith(str(tmp_path / "c"))
    assert caught.value.field == field
    assert program.factors_of(policy) == before
    load_checkpoint(policy, checkpoint)
    assert program.factors_of(policy) != before


def test_an_exported_adapter_is_no_checkpoint(policy, tmp_path):
    from rl_megatron_peft.backend.resume import load_checkpoint

    policy.save_pretrained(tmp_path / "a")
    assert read_adapter(tmp_path / "a").config == policy.lora
    with pytest.raises(AdapterError, match="it holds no optimizer; load it as an adapter"):
        load_checkpoint(policy, tmp_path / "a")
