"""The data plane without async: one thread per process runs the calls of all others."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from types import TracebackType
from typing import Any, NoReturn, ParamSpec, Self, TypeVar

from rl_protocol.errors import PlaneLostError
from rl_protocol.ports import DataPlane
from rl_transferqueue.client.client import connect
from rl_transferqueue.transport.control_client import FORKED
from rl_transferqueue.wire.descriptor import PlaneDescriptor

CLOSE_S = 30.0
P = ParamSpec("P")
T = TypeVar("T")


class Portal:
    """A daemon thread with an event loop that runs coroutines for other threads, until `close`.

    A forked process does not have the thread: there every call raises PlaneLostError.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rl-transferqueue-portal", daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine in the portal's thread; cancelling the future cancels it.

        Raises:
            PlaneLostError: this process is not the one that made the portal.
        """
        if os.getpid() != self._process:
            coroutine.close()
            raise PlaneLostError(FORKED)
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the portal's thread and wait for it; an interrupt cancels it.

        Raises:
            RuntimeError: called from the portal's own thread, which would deadlock.
            PlaneLostError: see `submit`.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError(
                "A blocking call in the portal's own thread would deadlock; await the async method instead."
            )
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def blocking(self, method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
        """A blocking version of an async method, with the same arguments."""

        @functools.wraps(method)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            return self.run(method(*args, **kwargs))

        call.__doc__ = inspect.getdoc(method)  # also where a method inherits it
        return call

    def close(self) -> None:
        """Cancel calls under way and stop the thread.

        A call that does not end within CLOSE_S is abandoned together with the thread.
        """
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
_locks: dict[int, threading.Lock] = {}
"""One for each process, as a fork could find a lock taken for ever."""


def portal() -> Portal:
    """The portal of this process, started by the first call."""
    pid = os.getpid()
    with _locks.setdefault(pid, threading.Lock()):
        if pid not in _portals:
            _portals[pid] = Portal()
        return _portals[pid]


class BlockingPlane:
    """A DataPlane with blocking methods, for any thread but the portal's.

    Arguments, results and errors are those of the async methods, and `with` closes it. It does not
    survive a fork, and can't be pickled: connect again in the new process.
    """

    def __init__(self, plane: DataPlane, loop_thread: Portal) -> None:
        self.put = loop_thread.blocking(plane.put)
        self.alloc = loop_thread.blocking(plane.alloc)
        self.get = loop_thread.blocking(plane.get)
        self.wait_ready = loop_thread.blocking(plane.wait_ready)
        self.claim = loop_thread.blocking(plane.claim)
        self.list_rows = loop_thread.blocking(plane.list_rows)
        self.watch = loop_thread.blocking(plane.watch)
        self.consumption_status = loop_thread.blocking(plane.consumption_status)
        self.production_status = loop_thread.blocking(plane.production_status)
        self.row_hosts = loop_thread.blocking(plane.row_hosts)
        self.reset_consumption = loop_thread.blocking(plane.reset_consumption)
        self.clear = loop_thread.blocking(plane.clear)
        self.unload = loop_thread.blocking(plane.unload)
        self.stats = loop_thread.blocking(plane.stats)
        self.traffic = plane.traffic
        self.close = loop_thread.blocking(plane.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "A BlockingPlane can't be pickled, because its connections belong to this process. Send its PlaneDescriptor and call "
            "connect_blocking there."
        )


def connect_blocking(descriptor: PlaneDescriptor, *, timeout_s: float = 10.0) -> BlockingPlane:
    """Connect without async; arguments and errors are those of `connect`."""
    loop_thread = portal()
    return BlockingPlane(loop_thread.run(connect(descriptor, timeout_s=timeout_s)), loop_thread)
