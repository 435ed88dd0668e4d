"""Leases: hold the blocks of a get until the last view of them is freed.

The controller takes a lease on the blocks in the same step in which it locates them, and no unit
reuses a block before all its leases have ended. All memory of the get refers to the lease's anchor.
The lease ends when the last array, memoryview or tensor made from that memory is freed, or with the
process.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections import deque
from itertools import count

from rl_protocol.errors import PlaneLostError
from rl_transferqueue.memory.anchors import Anchor
from rl_transferqueue.transport.control_client import ControlClient
from rl_transferqueue.wire.messages import ReleaseLeases

_TOGETHER_S = 0.02
"""Seconds to collect ended leases; Revoked and Reclaim messages flush them at once."""


class Leases:
    """Leases of one session. They may end at any time, in any thread, also after `close`.

    While the client is open, the loop reports ended leases to the controller in groups. After
    `close`, the thread that frees the last view reports it, on the socket that stays open for this.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, channel: ControlClient) -> None:
        self._loop = loop
        self._channel = channel
        self._ids = count(1)
        self._live: set[int] = set()
        self._ended: deque[int] = deque()
        self._scheduled = False
        self._detached = False
        self._reporting = threading.Lock()

    def new(self) -> tuple[int, Anchor]:
        """A new lease, which ends when its anchor is freed."""
        lease = next(self._ids)
        self._live.add(lease)
        anchor = Anchor()
        weakref.finalize(anchor, self._end, lease).atexit = False
        return lease, anchor

    def flush(self) -> None:
        """Report ended leases to the controller; on the loop, or in any thread once detached."""
        self._scheduled = False  # set before reading, so that later ends schedule another flush
        while self._ended and self._reporting.acquire(blocking=False):
            try:
                self._report()
            finally:
                self._reporting.release()

    def detach(self) -> None:
        """Stop using the loop, and close the channel once the last lease has ended."""
        self._detached = True
        self.flush()
        if not self._live:
            self._channel.close()

    def _arm(self) -> None:
        self._loop.call_later(_TOGETHER_S, self.flush)

    def _end(self, lease: int) -> None:
        """Runs in a finalizer, so it must not block or raise."""
        self._ended.append(lease)
        if self._detached:
            self.flush()
        elif not self._scheduled:
            self._scheduled = True
            # RuntimeError: the loop was closed before the client; the lease ends with the process.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._arm)

    def _report(self) -> None:
        ended: list[int] = []
        while self._ended:
            ended.append(self._ended.popleft())
        with contextlib.suppress(PlaneLostError):
            self._channel.tell(ReleaseLeases(tuple(ended)))
        self._live.difference_update(ended)
        if self._detached and not self._live:
            self._channel.close()
