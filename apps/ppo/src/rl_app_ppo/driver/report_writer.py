"""Writes the report of a run while it goes on, so that a run that is killed has one, too."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

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
"""Seconds after the run in which the report that is being written must be there, or the user is
told what the run waits for."""


class ReportWriter(Hook):
    """Hook that writes the report after steps, in a thread.

    Lifecycle: one of the run's hooks; `close` when the run has ended. A report that can't be
    written is logged and does not end the run.

    Args:
        files: of the run.
        say: prints a line for the user.
        every_s: as EVERY_S.
    """

    def __init__(self, files: RunFiles, say: Callable[[str], None], every_s: float = EVERY_S) -> None:
        self._files = files
        self._say = say
        self._every_s = every_s
        self._next = time.monotonic() + every_s
        self._writing: asyncio.Task[None] | None = None

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        del step, metrics
        idle = self._writing is None or self._writing.done()
        if idle and time.monotonic() >= self._next:
            self._writing = asyncio.create_task(self._write())

    async def close(self) -> None:
        """Wait until the report that is being written is there, at most CLOSE_S seconds.

        The thread that writes a late one can't be stopped, and `asyncio.run` waits for it. The last
        report of the run is written after that, so nothing is lost.
        """
        if self._writing is None:
            return
        _, late = await asyncio.wait({self._writing}, timeout=CLOSE_S)
        if late:
            text = (
                f"the report {self._files.report} is being written for more than {CLOSE_S:g} s after the run; the run ends "
                "once it is there, and then writes its last report"
            )
            logger.warning(text)
            self._say(text)

    async def _write(self) -> None:
        began = time.monotonic()
        try:
            await asyncio.to_thread(write_report, [self._files.folder], self._files.report)
        except RLError as error:
            logger.warning("The report can't be written: %s", error)
        now = time.monotonic()
        self._next = now + max(self._every_s, (now - began) / MOST_SHARE)
