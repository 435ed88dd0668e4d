"""Checkpoint folders: tell their kinds apart and write new ones atomically."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path

from rl_megatron_peft.errors import AdapterError, bad_file
from rl_protocol.errors import OutputError
from rl_protocol.support.disk_writes import fsync
from rl_protocol.support.temporary_folders import temporary_folder

PEFT_CONFIG = "adapter_config.json"
MANIFEST = "manifest.json"
FORMAT = "rl-megatron-peft/1"
LEGACY = "adapter_checkpoint"


class FolderKind(StrEnum):
    """Kinds of checkpoint folders."""

    RESUME = "a checkpoint to resume from"
    PEFT = "an adapter in the format of PEFT"
    LEGACY = "verl's old adapter_checkpoint format"
    UNFINISHED = "a Megatron checkpoint without a manifest"
    UNKNOWN = "no known format"


def folder_kind(path: Path) -> FolderKind:
    """Tell the kind of a folder from the files in it; a folder that does not exist is UNKNOWN.

    Raises:
        AdapterError: the folder can't be read.
    """
    try:
        return _kind(path)
    except OSError as error:
        raise bad_file(path, "layout", f"can't be read: {error.strerror or error}") from error


def _kind(path: Path) -> FolderKind:
    if (path / MANIFEST).is_file():
        return FolderKind.RESUME if _format(path / MANIFEST) == FORMAT else FolderKind.UNKNOWN
    if (path / PEFT_CONFIG).is_file():
        return FolderKind.PEFT
    if (path / LEGACY).is_dir() or any(path.glob("mp_rank_*_adapter.pt")):
        return FolderKind.LEGACY
    if (path / "dist_ckpt").is_dir() or (path / "metadata.json").is_file():
        return FolderKind.UNFINISHED
    return FolderKind.UNKNOWN


def refuse_unless_resumable(path: Path) -> None:
    """Check that the folder is a complete checkpoint to resume from.

    Raises:
        AdapterError: it is not; says what it is instead and what to do.
    """
    kind = folder_kind(path)
    if kind is FolderKind.UNKNOWN and not path.exists():
        raise AdapterError(f"{path} does not exist; name the folder of a checkpoint.", file=str(path), field="layout")
    advice = {
        FolderKind.PEFT: "it holds no optimizer; load it as an adapter (load_adapter) and start from there",
        FolderKind.LEGACY: "its files hold no optimizer; convert it with rl-megatron-peft convert --to resume",
        FolderKind.UNFINISHED: "writing it did not finish; resume from an earlier one",
        FolderKind.UNKNOWN: f"expected {MANIFEST} of format {FORMAT!r}",
    }
    if kind in advice:
        raise AdapterError(f"{path} holds {kind.value}: {advice[kind]}.", file=str(path), field="layout")


def whole_checkpoints(root: Path) -> Iterator[Path]:
    """Yield the complete checkpoints `<name>-<steps>` in a folder by increasing steps."""
    found = [
        path for path in root.glob("*-*") if path.name.rpartition("-")[2].isdigit() and not path.name.startswith(".")
    ]
    for path in sorted(found, key=lambda path: int(path.name.rpartition("-")[2])):
        if folder_kind(path) is FolderKind.RESUME:
            yield path


def new_folder(path: Path, write: Callable[[Path], object]) -> None:
    """Create a folder with the files that `write` puts into it.

    The folder appears complete or not at all: it is written beside `path`, flushed to disk and
    renamed. An existing folder is never touched.

    Raises:
        OutputError: `path` exists or can't be written.
    """
    if path.exists():
        raise OutputError(f"{path} exists; only new folders are written. Remove it or choose another.", path=str(path))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(".unfinished-", path.parent) as scratch:
            folder = scratch / path.name
            folder.mkdir()
            write(folder)
            fsync_tree(folder)
            folder.rename(path)
        fsync(path.parent)
    except OSError as error:
        raise OutputError(f"{path} can't be written: {error}.", path=str(path)) from error


def fsync_tree(folder: Path) -> None:
    """Flush the files and folders in a folder to disk, and the folder itself."""
    for path in folder.rglob("*"):
        fsync(path)
    fsync(folder)


def _format(file: Path) -> object:
    try:
        manifest = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return manifest.get("format") if isinstance(manifest, dict) else None
