"""Kinds of checkpoint folders."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rl_megatron_peft import AdapterError, FolderKind, folder_kind, read_adapter, whole_checkpoints
from rl_megatron_peft.peft.checkpoint_folders import new_folder, refuse_unless_resumable


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        ("adapter_config.json", FolderKind.PEFT, "holds no optimizer"),
        (
            "adapter_checkpoint/mp_rank_00_adapter.pt",
            FolderKind.LEGACY,
            "verl's old adapter_checkpoint format: its files hold no optimizer",
        ),
        ("mp_rank_00_001_adapter.pt", FolderKind.LEGACY, "rl-megatron-peft convert"),
        ("dist_ckpt/metadata.json", FolderKind.UNFINISHED, "writing it did not finish"),
        ("readme", FolderKind.UNKNOWN, "expected manifest.json"),
    ],
)
def test_folders_are_told_apart_and_refused_by_name(tmp_path: Path, make: str, kind: FolderKind, message: str):
    (tmp_path / make).parent.mkdir(exist_ok=True)
    (tmp_path / make).write_text("{}")
    assert folder_kind(tmp_path) is kind
    with pytest.raises(AdapterError, match=message) as caught:
        refuse_unless_resumable(tmp_path)
    assert (caught.value.file, caught.value.field) == (str(tmp_path), "layout")


def test_a_folder_that_does_not_exist_is_refused_as_such(tmp_path: Path):
    with pytest.raises(AdapterError, match="nothing does not exist; name the folder of a checkpoint") as caught:
        refuse_unless_resumable(tmp_path / "nothing")
    assert (caught.value.file, caught.value.field) == (str(tmp_path / "nothing"), "layout")


def test_whole_checkpoints_come_by_steps(tmp_path: Path):
    for name in ("step-10", "step-9", "step-11", ".step-12.partial", "other"):
        (tmp_path / name).mkdir()
        if name != "step-11":
            (tmp_path / name / "manifest.json").write_text('{"format": "rl-megatron-peft/1"}')
    assert [path.name for path in whole_checkpoints(tmp_path)] == ["step-9", "step-10"]
    assert folder_kind(tmp_path / "nothing") is FolderKind.UNKNOWN


@pytest.mark.parametrize(("read", "field"), [(folder_kind, "layout"), (read_adapter, "file")])
def test_a_folder_that_can_not_be_read_is_refused(tmp_path: Path, read: Callable[[Path], object], field: str):
    folder = tmp_path / ("a" * 300)  # also for root, who may read everything
    with pytest.raises(AdapterError, match=f"{field} can't be read: File name too long") as caught:
        read(folder)
    assert caught.value.file.startswith(str(folder))


def test_a_new_folder_is_on_the_disk_before_it_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    new, flushed, real = tmp_path / "new", dict[int, bool](), os.fsync

    def recorded(handle: int) -> None:
        flushed[os.fstat(handle).st_ino] = new.exists()
        real(handle)

    def write(folder: Path) -> None:
        (folder / "inside").mkdir()
        (folder / "inside" / "file").write_text("x")
        (folder / "file").write_text("y")

    monkeypatch.setattr(os, "fsync", recorded)
    new_folder(new, write)
    parts = [new, *new.rglob("*")]
    assert len(parts) == 4
    assert flushed == {**{path.stat().st_ino: False for path in parts}, tmp_path.stat().st_ino: True}
