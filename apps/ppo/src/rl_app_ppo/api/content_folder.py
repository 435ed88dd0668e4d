"""Folders named by the digest of their content, for what a run gets as Python objects.

Equal content has one folder, so a resumed run finds the same paths in its configuration.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

from rl_protocol.support.disk_writes import write_errors
from rl_protocol.support.temporary_folders import temporary_folder

_UNFINISHED = ".unfinished-"


def keep(cache: Path, kind: str, fill: Callable[[Path], object]) -> Path:
    """Write a folder, and keep it as `cache/<kind>-<digest of its files>`.

    A folder of that name with the same content stays; a damaged one is replaced.

    Args:
        cache: parent of the folder, created if it is missing.
        kind: prefix of its name.
        fill: writes files into an empty folder.

    Raises:
        OutputError: the folder can't be written.
    """
    with write_errors(cache, f"The {kind}", "Free some space there, or set model.cache_dir to another place."):
        cache.mkdir(parents=True, exist_ok=True)
        with temporary_folder(_UNFINISHED, cache) as workshop:
            fresh = workshop / "new"
            fresh.mkdir()
            fill(fresh)
            digest = _digest(fresh)
            kept = cache / f"{kind}-{digest[:24]}"
            if kept.is_dir() and _digest(kept) != digest:
                kept.rename(workshop / "damaged")
            if not kept.is_dir():
                _publish(fresh, kept, digest)
    return kept


def _publish(fresh: Path, kept: Path, digest: str) -> None:
    try:
        fresh.rename(kept)
    except OSError:
        if not kept.is_dir() or _digest(kept) != digest:  # otherwise another process was first
            raise
        shutil.rmtree(fresh)


def _digest(folder: Path) -> str:
    """Digest of the names and contents of all files of a folder."""
    whole = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        whole.update(f"{path.relative_to(folder).as_posix()}\0{content}\0".encode())
    return whole.hexdigest()
