"""Folders that are either whole or not there: the cache of warmed-up models. Needs no torch.

An entry `<name>/` holds files and `manifest.json`:

    {"format": 1, "facts": {...}, "files": {"model.safetensors": "<sha256>", ...}}

It is written under a temporary name and renamed, so a reader never sees half of one; damage done later shows in the digests.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rl_protocol.temporary import temporary_folder

MANIFEST = "manifest.json"
FORMAT = 1
UNFINISHED = ".unfinished-"
"""How the names of entries begin that are being made."""


def is_whole(entry: Path) -> bool:
    """Whether the entry holds exactly the files its manifest lists, with the digests it lists."""
    try:
        manifest: Any = json.loads((entry / MANIFEST).read_text(encoding="utf-8"))
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            return False
        return manifest.get("files") == _digests(entry)
    except (OSError, ValueError):  # the boundary: what can't be read or parsed is damaged, and will be rebuilt
        return False


def read_facts(entry: Path) -> dict[str, Any]:
    """The facts given to `publish` for a whole entry."""
    return json.loads((entry / MANIFEST).read_text(encoding="utf-8"))["facts"]


def publish(entry: Path, fill: Callable[[Path], Mapping[str, object]]) -> None:
    """Make the entry, replacing a damaged one.

    Args:
        entry: folder to make; its parent is made too.
        fill: writes the files into the (empty) folder it is given and returns JSON-able facts for the manifest.

    When another process publishes the same entry meanwhile, the entry that was there first stays.
    """
    entry.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(UNFINISHED, entry.parent) as workshop:
        fresh = workshop / "new"
        fresh.mkdir()
        facts = fill(fresh)
        manifest = {"format": FORMAT, "facts": dict(facts), "files": _digests(fresh)}
        (fresh / MANIFEST).write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        _put_in_place(fresh, entry, workshop / "old")


def _put_in_place(fresh: Path, entry: Path, attic: Path) -> None:
    """Rename `fresh` to `entry` unless a whole one is there; a damaged one goes to `attic`, which the caller deletes."""
    if is_whole(entry):
        return
    if entry.is_dir():
        entry.rename(attic)
    elif entry.exists():
        entry.unlink()
    try:
        fresh.rename(entry)
    except OSError:
        if not is_whole(entry):  # otherwise somebody else put theirs here between the two renames
            raise
        shutil.rmtree(fresh)


def _digests(folder: Path) -> dict[str, str]:
    """sha256 of every file below the folder but the manifest, by relative path."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / MANIFEST)
    return {p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
