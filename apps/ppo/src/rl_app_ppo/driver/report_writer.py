"""Writes the report of a run while it goes on, so that a run that is killed has one, too."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

from rl_app_ppo.outputs.run_folder import RunFiles
from rl_app_ppo.report.page import write_report
from rl_protocol import RLError
from rl_trainer import Hook

logger = logging.getLogger(__name__)
EVERY_S = 60.0
"""Seconds from the end of one report to the begin of the next, at least."""
MOST_SHARE = 0.01
"""Share of the time in which reports are written, at most."""
CLOSE_S = 60.0
"""Seconds that the last report may take after the run."""


class ReportWriter(Hook):
    """Hook that writes the report after steps, in a thread.

    Lifecycle: one of the run's hooks; `close` when the run has ended. A report that can't be
    written is logged and does not end the run.

    Args:
        files: of the run.
        every_s: as EVERY_S.
    """

    def __init__(self, files: RunFiles, every_s: float = EVERY_S) -> None:
        self._files = files
        self._every_s = every_s
        self._next = time.monotonic() + every_s
        self._writing: asyncio.Task[None] | None = None

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        del step, metrics
        idle = self._writing is None or self._writing.done()
        if idle and time.monotonic() >= self._next:
            self._writing = asyncio.create_task(self._write())

    async def close(self) -> None:
        """Wait until the report that is being written is there, at most CLOSE_S seconds."""
        if self._writing is not None:
            await asyncio.wait({self._writing}, timeout=CLOSE_S)

    async def _write(self) -> None:
        began = time.monotonic()
        try:
            await asyncio.to_thread(write_report, [self._files.folder], self._files.report)
        except RLError as error:
            logger.warning("The report can't be written: %s", error)
        now = time.monotonic()
        self._next = now + max(self._every_s, (now - began) / MOST_SHARE)
