"""Run a coroutine from synchronous code: a script, a thread, or a notebook."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TypeVar

from rl_protocol import RLError

logger = logging.getLogger(__name__)
T = TypeVar("T")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a run. SIGHUP comes when its terminal is closed; `nohup` has it ignored."""
_LOOK_S = 0.5
"""Seconds between looks at pending signals: one that comes just before a wait does not end it."""


def run_interruptibly(work: Coroutine[Any, Any, T], interrupted: Callable[[], None] = lambda: None) -> T:
    """Run a coroutine to its end in an event loop of its own.

    In the main thread, Ctrl-C, SIGTERM and SIGHUP cancel it. If an event loop runs in this thread
    already, as in a notebook, the coroutine runs in another thread, and this one waits for it;
    Ctrl-C cancels it there too.

    Args:
        work: the coroutine.
        interrupted: called once, before the coroutine is cancelled by a signal.

    Raises:
        KeyboardInterrupt: a signal has cancelled the coroutine.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run_here(work, interrupted)
    return _run_in_thread(work, interrupted)


def _run_here(work: Coroutine[Any, Any, T], interrupted: Callable[[], None]) -> T:
    if threading.current_thread() is not threading.main_thread():
        return asyncio.run(work)  # signals reach the main thread alone
    try:
        with _handlers_restored():
            return asyncio.run(_cancelled_by_signals(work, interrupted))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def _run_in_thread(work: Coroutine[Any, Any, T], interrupted: Callable[[], None]) -> T:
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[T]]] = Future()

    async def cancellable() -> T:
        task = asyncio.ensure_future(work)
        started.set_result((asyncio.get_running_loop(), task))
        return await task

    main = threading.current_thread() is threading.main_thread()
    with _handlers_restored(), ThreadPoolExecutor(max_workers=1, thread_name_prefix="rl-app-ppo") as pool:
        running = pool.submit(asyncio.run, cancellable())
        try:
            if main and callable(signal.getsignal(signal.SIGINT)):  # that of asyncio.run only cancels its task
                signal.signal(signal.SIGINT, signal.default_int_handler)
            while not wait((running,), _LOOK_S).done:
                pass
            return running.result()
        except KeyboardInterrupt:
            if main:
                signal.signal(signal.SIGINT, _ignore)
            interrupted()
            loop, task = started.result()
            with suppress(RuntimeError):  # the coroutine has just ended, and its loop is closed
                loop.call_soon_threadsafe(task.cancel)
            raise  # leaving the pool waits until the coroutine has cleaned up


def _ignore(number: int, frame: FrameType | None) -> None:
    """A later Ctrl-C, which must not interrupt the clean-up; see `_cancelled_by_signals`."""
    del number, frame
    logger.info("ending already")


@contextmanager
def interrupts_deferred() -> Generator[None]:
    """Let signals within take effect at the end: for imports, which they would leave half done.

    Ray that is half imported prints a traceback when the process ends.

    Raises:
        KeyboardInterrupt: at the end, if Ctrl-C was pressed and raises it at other times.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[tuple[int, FrameType | None]] = []
    found = {number: signal.getsignal(number) for number in _SIGNALS}
    # the others end the process at once, are ignored, or were not installed from Python
    before = {number: handler for number, handler in found.items() if callable(handler)}
    for number in before:
        signal.signal(number, lambda number, frame: arrived.append((number, frame)))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if arrived:
            number, frame = arrived[0]
            before[signal.Signals(number)](number, frame)


@contextmanager
def _handlers_restored() -> Generator[None]:
    """Restore this process's signal handlers, which event loops and Ray replace."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: it was not installed from Python
                signal.signal(number, handler)


async def _cancelled_by_signals(work: Coroutine[Any, Any, T], interrupted: Callable[[], None]) -> T:
    """Cancel the work at the first Ctrl-C, SIGTERM or SIGHUP and ignore later ones.

    `uv run` forwards a Ctrl-C that the terminal has already sent to this process; the second one
    must not interrupt the clean-up, which has deadlines. An error of the work after a signal is
    logged: it may be of a process that the same signal has ended, or older than the signal.

    Raises:
        CancelledError: the work has failed after a signal.
    """
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
    handled = [number for number in _SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    ending = asyncio.Event()

    def end() -> None:
        ending.set()
        for number in handled:
            loop.add_signal_handler(number, logger.info, "ending already")
        interrupted()
        task.cancel()

    for number in handled:
        loop.add_signal_handler(number, end)
    try:
        return await task
    except RLError as error:
        if not ending.is_set():
            raise
        logger.warning("After the interrupt: %s", error)
        raise asyncio.CancelledError from error
