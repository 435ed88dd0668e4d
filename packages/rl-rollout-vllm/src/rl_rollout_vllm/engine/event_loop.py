"""An event loop in its own thread, for an engine that other loops and threads call."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine
from concurrent.futures import Future, wait
from typing import Any, Generic, TypeVar

from rl_protocol.errors import RolloutError

T = TypeVar("T")
_CLOSE_TIMEOUT_S = 30.0


class LoopThread:
    """Runs coroutines on one loop. It runs when constructed; `close` ends it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rl-rollout-vllm", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine and block until it is done; it is cancelled at the deadline.

        Raises:
            RolloutError: the deadline passed, or the loop is closed.
        """
        future = self._submit(work)
        try:
            return future.result(timeout_s)
        except TimeoutError as error:
            if future.done():
                raise
            future.cancel()
            raise RolloutError(f"The vLLM engine did not answer within {timeout_s:g} s.") from error

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine from another loop; cancelling the caller cancels the coroutine.

        Raises:
            RolloutError: the loop is closed.
        """
        return await asyncio.wrap_future(self._submit(work))

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._loop.is_closed():
            work.close()
            raise RolloutError("The vLLM engine is closed; start a new one.")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Cancel all tasks and end the thread; safe to call twice.

        While a call blocks the loop, as the start of vLLM does, the thread ends after that call.
        """
        if self._thread.is_alive():
            cancelled = asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop)
            cancelled.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._loop.stop))
            if not wait([cancelled], _CLOSE_TIMEOUT_S).done:
                return
            self._thread.join(_CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():
            self._loop.close()


class RemoteIterator(Generic[T]):
    """An async generator whose reader is on another loop.

    `close` waits until a cancelled `next` has left the generator.
    """

    def __init__(self, items: AsyncGenerator[T]) -> None:
        self._items = items
        self._lock = asyncio.Lock()

    async def next(self) -> T | None:
        """Return the next item, or None at the end."""
        async with self._lock:
            return await anext(self._items, None)

    async def close(self) -> None:
        """Close the generator."""
        async with self._lock:
            await self._items.aclose()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
