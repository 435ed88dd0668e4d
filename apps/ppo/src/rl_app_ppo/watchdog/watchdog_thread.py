"""The watchdog: a thread beside the event loop of the driver."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from types import FrameType

from rl_protocol import HangError, RLError

logger = logging.getLogger(__name__)
INTERRUPT = signal.SIGUSR1
"""Ends a callback that blocks the event loop in the main thread."""
_LOOKS = 10
"""How often the watchdog looks before a run counts as hanging."""
_GRACE_S = 10.0
"""Seconds that the event loop has to cancel the run, before its callback is interrupted."""
_JOIN_S = 60.0


class Watchdog:
    """Ends a run in which nothing has moved for some time.

    Time is counted in looks, so that a suspended machine or a stopped driver does not count.

    Args:
        hang_s: seconds without progress.
        progress: any value that changes with progress; called in the thread.
        report: says who waits for what; called in the thread, once.
    """

    def __init__(self, hang_s: float, progress: Callable[[], object], report: Callable[[], str]) -> None:
        self._hang_s = hang_s
        self._look_s = min(1.0, hang_s / _LOOKS)
        self._progress = progress
        self._report = report
        self._ended = threading.Event()
        self._cancelled = threading.Event()
        self._found = ""

    @asynccontextmanager
    async def watching(self) -> AsyncGenerator[None]:
        """Watch while the context runs; a hang cancels it.

        Raises:
            HangError: nothing has moved for `hang_s` seconds.
        """
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None, "the driver runs in a task"

        def cancel() -> None:
            self._cancelled.set()
            if not self._ended.is_set():
                task.cancel()

        main = threading.current_thread() is threading.main_thread()
        before = signal.signal(INTERRUPT, self._raise) if main else None
        thread = threading.Thread(target=self._watch, args=(loop, cancel, main), name="watchdog", daemon=True)
        thread.start()
        try:
            yield
        except (asyncio.CancelledError, RLError) as error:
            if not self._found:
                raise
            if isinstance(error, asyncio.CancelledError):
                task.uncancel()
            raise HangError(self._found) from None
        finally:
            self._ended.set()
            thread.join(_JOIN_S)  # not an await, which the watchdog could cancel
            if main:
                signal.signal(INTERRUPT, before or signal.SIG_DFL)

    def _watch(self, loop: asyncio.AbstractEventLoop, cancel: Callable[[], None], interrupts: bool) -> None:
        seen, still_s = self._progress(), 0.0
        while not self._ended.wait(self._look_s):
            now = self._progress()
            still_s, seen = (still_s + self._look_s if now == seen else 0.0), now
            if still_s >= self._hang_s:
                break
        else:
            return
        found = f"Nothing has moved for {self._hang_s:g} s (trainer.hang_report_s), and the report about it failed."
        try:
            found = self._report()
        finally:  # the run ends without a report, too
            self._found = found
            loop.call_soon_threadsafe(cancel)
            if interrupts and not self._cancelled.wait(_GRACE_S):
                logger.error("The event loop is blocked: its callback is interrupted.")
                signal.pthread_kill(threading.main_thread().ident or 0, INTERRUPT)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        raise HangError(self._found)
