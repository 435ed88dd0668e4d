"""The data plane without async: one thread with one event loop per process runs the calls of all who wait for them."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

from rl_protocol.ports import DataPlane
from rl_transferqueue.client import connect
from rl_transferqueue.descriptor import PlaneDescriptor

CLOSE_S = 30.0
P = ParamSpec("P")
T = TypeVar("T")


class Portal:
    """A thread that runs coroutines for other threads. Lifecycle: running from the start until `close`; daemonic."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rl-transferqueue-portal", daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine there without waiting for it; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there and wait for it; an interrupt here cancels it there.

        Raises:
            RuntimeError: called from the portal's own thread, which would wait for itself.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError(
                "A blocking call inside the portal's own loop would wait for itself; await the async one."
            )
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def blocking(self, method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
        """The sync twin of an async method, with the same arguments."""

        @functools.wraps(method)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            return self.run(method(*args, **kwargs))

        return call

    def close(self) -> None:
        """Stop the thread; calls under way are cancelled. What does not heed that within CLOSE_S is left behind with its thread."""
        self.run(_cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=CLOSE_S)
    await asyncio.get_running_loop().shutdown_default_executor()


_portals: dict[int, Portal] = {}
_lock = threading.Lock()


def portal() -> Portal:
    """The portal of this process, started when first asked for."""
    with _lock:
        pid = os.getpid()
        if pid not in _portals:
            _portals[pid] = Portal()
        return _portals[pid]


class BlockingPlane:
    """The sync twin of a DataPlane: the same methods with the same arguments, results and errors, from any thread but the portal's."""

    def __init__(self, plane: DataPlane, on: Portal) -> None:
        self.put = on.blocking(plane.put)
        self.alloc = on.blocking(plane.alloc)
        self.get = on.blocking(plane.get)
        self.wait_ready = on.blocking(plane.wait_ready)
        self.claim = on.blocking(plane.claim)
        self.list_rows = on.blocking(plane.list_rows)
        self.watch = on.blocking(plane.watch)
        self.consumption_status = on.blocking(plane.consumption_status)
        self.production_status = on.blocking(plane.production_status)
        self.reset_consumption = on.blocking(plane.reset_consumption)
        self.clear = on.blocking(plane.clear)
        self.stats = on.blocking(plane.stats)
        self.traffic = plane.traffic
        self.close = on.blocking(plane.close)


def connect_blocking(descriptor: PlaneDescriptor, *, timeout_s: float = 10.0) -> BlockingPlane:
    """Connect without async; see `connect`."""
    on = portal()
    return BlockingPlane(on.run(connect(descriptor, timeout_s=timeout_s)), on)
