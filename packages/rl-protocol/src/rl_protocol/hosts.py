"""Which host this is."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path


@cache
def this_host() -> str:
    """Equal for two processes exactly if they can map each other's memory: same boot of the same kernel, same pid namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115 - it is not a path
