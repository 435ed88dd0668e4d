"""What kind of checkpoint a folder holds, told from the names in it. Nothing is imported."""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

from rl_megatron_peft.adapter import CONFIG_FILE
from rl_megatron_peft.errors import AdapterError

MANIFEST = "manifest.json"
FORMAT = "rl-megatron-peft/1"
LEGACY = "adapter_checkpoint"


class FolderKind(StrEnum):
    """Kinds that are told apart."""

    RESUME = "a checkpoint to resume from"
    PEFT = "an adapter in the format of PEFT"
    LEGACY = "verl's old adapter_checkpoint format"
    UNFINISHED = "a Megatron checkpoint without a manifest"
    UNKNOWN = "nothing that is known"


def folder_kind(path: Path) -> FolderKind:
    """Of the folder; one that is not there is UNKNOWN."""
    if (path / MANIFEST).is_file():
        return FolderKind.RESUME if _format(path / MANIFEST) == FORMAT else FolderKind.UNKNOWN
    if (path / CONFIG_FILE).is_file():
        return FolderKind.PEFT
    if (path / LEGACY).is_dir() or any(path.glob("mp_rank_*_adapter.pt")):
        return FolderKind.LEGACY
    return (
        FolderKind.UNFINISHED
        if (path / "dist_ckpt").is_dir() or (path / "metadata.json").is_file()
        else FolderKind.UNKNOWN
    )


def refuse_unless_resumable(path: Path) -> None:
    """That training can go on from the folder.

    Raises:
        AdapterError: says what it is instead, and what to do.
    """
    kind = folder_kind(path)
    advice = {
        FolderKind.PEFT: "it holds no optimizer; load it as an adapter (load_adapter) and start from there",
        FolderKind.LEGACY: "its files hold no optimizer; turn it into one to resume from with rl-megatron-peft convert",
        FolderKind.UNFINISHED: "writing it did not end; resume from an earlier one",
        FolderKind.UNKNOWN: f"expected {MANIFEST} of format {FORMAT!r}",
    }
    if kind in advice:
        raise AdapterError(f"{path} holds {kind.value}: {advice[kind]}.", file=str(path), field="layout")


def whole_checkpoints(root: Path) -> Iterator[Path]:
    """Checkpoints below a folder that were written to the end, oldest first: those named `<anything>-<steps>`, by steps."""
    found = [
        path for path in root.glob("*-*") if path.name.rpartition("-")[2].isdigit() and not path.name.startswith(".")
    ]
    for path in sorted(found, key=lambda path: int(path.name.rpartition("-")[2])):
        if folder_kind(path) is FolderKind.RESUME:
            yield path


def _format(file: Path) -> object:
    try:
        manifest = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return manifest.get("format") if isinstance(manifest, dict) else None
