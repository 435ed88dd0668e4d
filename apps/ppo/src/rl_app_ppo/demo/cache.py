"""The cache of warmed-up models. Imports no torch.

An entry `<name>/` holds files and `manifest.json`:

    {"format": 1, "facts": {...}, "files": {"model.safetensors": "<sha256>", ...}}

It is written under a temporary name and renamed, so that a reader never sees half of one. The
digests reveal later damage.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rl_app_ppo.demo.settings import WarmUpSettings, content_hash
from rl_protocol.support.temporary_folders import temporary_folder

MANIFEST = "manifest.json"
FORMAT = 1
UNFINISHED = ".unfinished-"
"""Prefix of the names of unfinished entries."""


def entry_path(cache_dir: Path, settings: WarmUpSettings) -> Path:
    """Folder of the base model of these settings in the cache."""
    return cache_dir / f"base-{content_hash(settings)[:16]}"


def is_whole(entry: Path) -> bool:
    """Whether the entry has exactly the files and digests of its manifest."""
    try:
        manifest: Any = json.loads((entry / MANIFEST).read_text(encoding="utf-8"))
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            return False
        return manifest.get("files") == _digests(entry)
    except (OSError, ValueError):  # an entry that can't be read is damaged and will be rebuilt
        return False


def read_facts(entry: Path) -> dict[str, Any]:
    """The facts in the manifest of an entry."""
    return json.loads((entry / MANIFEST).read_text(encoding="utf-8"))["facts"]


def publish(entry: Path, fill: Callable[[Path], Mapping[str, object]]) -> None:
    """Create an entry, or replace a damaged one.

    If another process publishes the same entry at the same time, the first one stays.

    Args:
        entry: folder to create, with its parents.
        fill: writes the files into an empty folder and returns facts for the manifest.
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
    """Rename `fresh` to `entry` unless that is whole; a damaged one moves to `attic`."""
    if is_whole(entry):
        return
    with suppress(FileNotFoundError):  # another process has just moved it
        if entry.is_dir():
            entry.rename(attic)
        elif entry.exists():
            entry.unlink()
    try:
        fresh.rename(entry)
    except OSError:
        if not is_whole(entry):  # otherwise another process was faster
            raise
        shutil.rmtree(fresh)


def _digests(folder: Path) -> dict[str, str]:
    """Relative path -> sha256 of every file in the folder except the manifest."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / MANIFEST)
    return {p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
