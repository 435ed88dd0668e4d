"""An event loop in a thread of its own: where an engine lives while its callers come from other loops, or from none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, Generic, TypeVar

from rl_protocol.errors import RolloutError

T = TypeVar("T")
_CLOSE_TIMEOUT_S = 30.0


class LoopThread:
    """Runs coroutines on one loop. Lifecycle: made running; `close` ends it."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run from a thread without a loop, or one that may be blocked; the work is cancelled when the deadline passes.

        Raises:
            RolloutError: the deadline passed.
        """
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except TimeoutError as error:
            if future.done():
                raise
            future.cancel()
            raise RolloutError(f"The vLLM engine did not answer within {timeout_s:g} s.") from error

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run from another loop; cancelling the caller cancels the work."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def close(self) -> None:
        """Cancel what runs, and end the thread; safe to call twice."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result(_CLOSE_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():
            self._loop.close()


class Pulled(Generic[T]):
    """A generator that is read and closed from another loop; closing waits for a reader that was cancelled to be out of it."""

    def __init__(self, items: AsyncGenerator[T]) -> None:
        self._items = items
        self._lock = asyncio.Lock()

    async def next(self) -> T | None:
        """The next one; None: there are no more."""
        async with self._lock:
            return await anext(self._items, None)

    async def close(self) -> None:
        """Close it."""
        async with self._lock:
            await self._items.aclose()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
