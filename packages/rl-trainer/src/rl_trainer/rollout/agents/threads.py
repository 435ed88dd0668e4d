"""Runs code of users in threads that can't hold up others."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """The result of `work`, or what it raises, run in a daemon thread: one that hangs neither
    blocks others nor the exit.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(end: Callable[[], None]) -> None:
        if not done.done():
            end()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - raised in the caller
            failure = _raisable(error)
            end = lambda: done.set_exception(failure)  # noqa: E731
        else:
            end = lambda: done.set_result(result)  # noqa: E731
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it the wait
            loop.call_soon_threadsafe(settle, end)

    threading.Thread(target=run, name="agent", daemon=True).start()
    return await done


def _raisable(error: BaseException) -> Exception:
    """The error itself, or another one in place of what would end the caller's event loop or task,
    or can't be set on a future.
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    what = f"sys.exit({error.code!r}) was called" if isinstance(error, SystemExit) else f"{error!r} was raised"
    failure = RuntimeError(what)
    failure.__cause__ = error
    return failure
