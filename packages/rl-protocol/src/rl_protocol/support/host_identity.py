"""Identify the host, to tell whether two processes can share memory."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path


@cache
def this_host() -> str:
    """A name that two processes share exactly if they run under the same kernel boot and pid
    namespace.

    Such processes can map each other's memory.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115 - not a path
