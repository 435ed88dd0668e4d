"""Report the progress of long synchronizations, for example as a progress bar."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import TextIO, TypeAlias

QUIET_S = 2.0
"""Shorter syncs report nothing."""
_EVERY_S = 0.5
PHASES = ("send", "receive", "activate")


@dataclass(frozen=True, slots=True)
class SyncProgress:
    """Progress of one sync."""

    version: int
    phase: str
    """One of PHASES, or `done` for the last report, also after a failure."""
    seconds: float
    """Seconds since the sync began."""


ProgressCallback: TypeAlias = Callable[[SyncProgress], None]


@contextlib.asynccontextmanager
async def report_progress(
    tell: ProgressCallback | None, version: int, phase: Callable[[], str]
) -> AsyncGenerator[None]:
    """Once QUIET_S have passed, call `tell` with the phase every half second, and with `done` on
    exit."""
    if tell is None:
        yield
        return
    start = time.monotonic()

    async def tick() -> None:
        await asyncio.sleep(QUIET_S)
        while True:
            tell(SyncProgress(version, phase(), time.monotonic() - start))
            await asyncio.sleep(_EVERY_S)

    ticking = asyncio.create_task(tick())
    try:
        yield
    finally:
        ticking.cancel()
        await asyncio.wait({ticking})
        if not ticking.cancelled():
            ticking.result()
        if time.monotonic() - start >= QUIET_S:
            tell(SyncProgress(version, "done", time.monotonic() - start))


class ProgressBar:
    """Draws one line per sync if the stream is a terminal.

    Args:
        stream: defaults to standard error.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream

    def __call__(self, progress: SyncProgress) -> None:
        """Redraw the line."""
        if not self._stream.isatty():
            return
        done = progress.phase not in PHASES
        passed = len(PHASES) if done else PHASES.index(progress.phase)
        bar = "#" * (4 * passed) + "." * (4 * (len(PHASES) - passed))
        self._stream.write(f"\rweights {progress.version} [{bar}] {progress.phase:<8} {progress.seconds:5.1f} s")
        self._stream.write("\n" if done else "")
        self._stream.flush()
