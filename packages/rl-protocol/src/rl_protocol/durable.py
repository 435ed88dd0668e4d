"""What must be on the disk before something else is."""

from __future__ import annotations

import os
from pathlib import Path


def fsync(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk when this returns."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
