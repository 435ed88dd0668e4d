"""Find files in shared memory that no living process holds.

Other tests use shared memory at the same time, so a new file alone is no leak: a file that no
process holds is one.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def held_by(process: Path) -> set[str]:
    """Return the names of the files in shared memory that a process has open or mapped.

    `process` is a folder of /proc.
    """
    paths: set[str] = set()
    with suppress(OSError):  # the process may have ended
        paths.update(
            line.split(None, 5)[5].strip()
            for line in (process / "maps").read_text().splitlines()
            if "/dev/shm/" in line
        )
    with suppress(OSError):
        for fd in (process / "fd").iterdir():
            with suppress(OSError):
                paths.add(str(fd.readlink()))
    return {path.removeprefix("/dev/shm/") for path in paths if path.startswith("/dev/shm/")}


def abandoned() -> set[str]:
    """Return the names of the files that no living process holds.

    Semaphores (`sem.`) are left out, because this project creates none.
    """
    found = {entry.name for entry in SHARED_MEMORY.iterdir() if not entry.name.startswith("sem.")}
    for process in Path("/proc").iterdir():
        if found and process.name.isdecimal():
            found -= held_by(process)
    return found


@contextmanager
def no_memory_left(timeout_s: float = 60.0) -> Generator[None]:
    """Fail if the block leaves abandoned files that are still there after the timeout."""
    before = abandoned()
    yield
    deadline = time.monotonic() + timeout_s
    while left := abandoned() - before:
        assert time.monotonic() < deadline, f"no process holds {sorted(left)} in shared memory"
        time.sleep(0.05)
