from __future__ import annotations

import asyncio
import itertools
import signal
import time

import pytest

from rl_app_ppo.watchdog import watchdog_thread
from rl_app_ppo.watchdog.watchdog_thread import INTERRUPT, Watchdog
from rl_protocol import HangError, WorkerError

HANG_S = 0.3


def watch(work, progress=lambda: 0, reports=None):
    async def main():
        async with Watchdog(HANG_S, progress, lambda: (["who waits"] if reports is None else reports).pop()).watching():
            return await work()

    return asyncio.run(main())


def test_a_run_in_which_nothing_moves_ends_with_the_report():
    cleaned = []

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(True)

    before = signal.getsignal(INTERRUPT)
    with pytest.raises(HangError, match="who waits"):
        watch(work)
    assert cleaned == [True]
    assert signal.getsignal(INTERRUPT) is before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_report_that_fails_ends_the_run_all_the_same():
    with pytest.raises(HangError, match=r"^Nothing has moved for 0\.3 s .*, and the report about it failed\.$"):
        watch(lambda: asyncio.wait_for(asyncio.Event().wait(), 60), reports=[])


def test_progress_keeps_a_run_alive():
    counter = itertools.count()

    async def work():
        await asyncio.sleep(4 * HANG_S)
        return "done"

    assert watch(work, lambda: next(counter)) == "done"


def test_a_callback_that_blocks_the_event_loop_is_interrupted(monkeypatch):
    monkeypatch.setattr(watchdog_thread, "_GRACE_S", 0.1)

    async def work():
        time.sleep(60)  # noqa: ASYNC251 - as a hook that blocks does

    with pytest.raises(HangError, match="who waits"):
        watch(work)


def test_an_error_that_follows_from_the_end_is_the_hang():
    async def work():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise WorkerError("was cancelled") from None

    with pytest.raises(HangError, match="who waits"):
        watch(work)


@pytest.mark.parametrize("error", [WorkerError("died"), asyncio.CancelledError()])
def test_other_ends_stay_what_they_are(error):
    async def work():
        raise error

    with pytest.raises(type(error)):
        watch(work)
