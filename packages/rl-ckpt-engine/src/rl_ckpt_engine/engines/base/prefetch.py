"""Prefetch: receive a version while its sender still writes it, before its manifest exists."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from rl_ckpt_engine.payload.block_stream import Deadline
from rl_protocol.errors import WeightSyncError

_log = logging.getLogger(__name__)
_POLL_S = 0.001


class Prefetch:
    """A running prefetch, as a task of the event loop in which it is created.

    Args:
        version: the version that the sender writes, or will write.
        deadline: ends the prefetch if `end` is not called.
        receive: receives what has been written; calls `more` to wait for the next bytes. Its
            WeightSyncError ends the prefetch: what is missing is received afterwards.
    """

    def __init__(self, version: int, deadline: Deadline, receive: Callable[[Prefetch], Awaitable[None]]) -> None:
        self.version = version
        self.deadline = deadline
        self._sent = self._last_look = False
        self._task = asyncio.get_running_loop().create_task(self._run(receive))

    @property
    def done(self) -> bool:
        """Whether it has ended, and so writes no more into the receiver's memory."""
        return self._task.done()

    async def more(self) -> bool:
        """Wait a moment for the sender; False if it writes no more and the caller has looked since.

        Raises:
            WeightSyncError: the deadline has passed.
        """
        if self._last_look:
            return False
        if self._sent:
            self._last_look = True
        else:
            self.deadline.check()
            await asyncio.sleep(_POLL_S)
        return True

    async def end(self, deadline: Deadline) -> None:
        """Let the prefetch receive what has been written, without waiting for more, until the
        deadline. Errors other than WeightSyncError are bugs and propagate."""
        self._sent = True
        if not self._task.done():
            await asyncio.wait({self._task}, timeout=deadline.left_s)
        self.cancel()
        if not self._task.done():
            await asyncio.wait({self._task})
        if not self._task.cancelled():
            self._task.result()

    def cancel(self) -> None:
        """Stop at the next `await`; no effect after the end."""
        self._task.cancel()

    async def _run(self, receive: Callable[[Prefetch], Awaitable[None]]) -> None:
        try:
            await receive(self)
        except WeightSyncError as error:
            _log.debug("Prefetching version %d ended early: %s", self.version, error)
