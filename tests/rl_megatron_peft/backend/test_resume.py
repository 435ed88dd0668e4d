"""Checkpoints that can't be resumed from are refused with file and field."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from traceback import StackSummary
from types import SimpleNamespace

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
    with pytest.raises(OutputError, match=rf"^{path} exists; a checkpoint needs a new folder"):
        save_checkpoint(policy, path)
    assert [p.name for p in path.parent.iterdir()] == ["step-1"]
    return path


@pytest.fixture
def writing(monkeypatch):
    """writing(write): have Megatron write the tensors with `write(save, tensors, folder)`."""
    from rl_megatron_peft.backend import resume

    make = resume.get_default_save_sharded_strategy

    def set_to(write):
        def strategy():
            made = make()
            save = partial(write, made.save)
            return SimpleNamespace(backend=made.backend, version=made.version, save=save)

        monkeypatch.setattr(resume, "get_default_save_sharded_strategy", strategy)

    return set_to


def test_a_checkpoint_that_can_not_be_written_leaves_nothing(policy, tmp_path, writing):
    """Megatron raises this on every rank if a file can't be written; it is no Exception."""
    from torch.distributed.checkpoint import CheckpointException

    from rl_megatron_peft.backend.resume import save_checkpoint

    def full(save, tensors, folder):
        assert list(tmp_path.rglob("dist_ckpt")) == [folder]
        assert not (tmp_path / "step-1").exists()
        raise CheckpointException("write", {0: (RuntimeError("No space left on device"), StackSummary())})

    writing(full)
    with pytest.raises(OutputError, match=r"can't be written to .*step-1: No space left on device"):
        save_checkpoint(policy, tmp_path / "step-1")
    assert list(tmp_path.iterdir()) == []


def test_a_failure_of_the_file_that_only_the_first_rank_writes_reaches_all(policy, tmp_path, monkeypatch, writing):
    import torch

    from rl_megatron_peft.backend.resume import save_checkpoint

    def full(state, path):
        raise RuntimeError(f"{Path(path).name}: iostream error")

    writing(lambda save, tensors, folder: pytest.fail("the other ranks would wait in this call"))
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OutputError, match=r"can't be written to .*step-1: common.pt: iostream error"):
        save_checkpoint(policy, tmp_path / "step-1")
    assert list(tmp_path.iterdir()) == []


def test_two_processes_save_one_checkpoint(policy, tmp_path, writing):
    """The second one to finish is refused, and neither writes into the files of the other."""
    from rl_megatron_peft.backend.resume import load_checkpoint, save_checkpoint

    def with_another(save, tensors, folder):
        writing(lambda save, tensors, folder: save(tensors, folder))
        save_checkpoint(policy, tmp_path / "step-1")
        assert list(folder.glob("*.distcp")) == []
        save(tensors, folder)

    writing(with_another)
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
