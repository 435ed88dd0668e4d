"""Who holds which blocks: why a view of shared memory never changes under its reader.

The controller holds the blocks of a get (a lease) in the same step in which it says where the columns are, and no unit uses a block again
before all its leases have ended. The lease hangs on an anchor that all memory of the get refers to: it ends when the last array, memoryview
or tensor made from it is gone, or with the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections import deque
from itertools import count

from rl_protocol.errors import PlaneLostError
from rl_transferqueue.channel import Channel
from rl_transferqueue.messages import ReleaseLeases

_TOGETHER_S = 0.02
"""How long the end of a lease may wait for others; who needs the memory says so (Revoked, Reclaim) and is not kept waiting."""


class Anchor:
    """What all memory of one lease refers to; its end is the end of the lease."""

    __slots__ = ("__weakref__",)


class Leases:
    """Leases of one session. They may end at any time, in any thread, also after the client was closed.

    While the client is open the ends of a moment are told to the controller together, from the loop. Afterwards whoever drops the last view tells it,
    on the socket that is kept open for this.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, channel: Channel) -> None:
        self._loop = loop
        self._channel = channel
        self._ids = count(1)
        self._live: set[int] = set()
        self._ended: deque[int] = deque()
        self._scheduled = False
        self._detached = False
        self._telling = threading.Lock()

    def new(self) -> tuple[int, Anchor]:
        """A lease that ends with its anchor."""
        lease = next(self._ids)
        self._live.add(lease)
        anchor = Anchor()
        weakref.finalize(anchor, self._end, lease).atexit = False
        return lease, anchor

    def flush(self) -> None:
        """Tell the controller what has ended; on the loop, or anywhere once detached."""
        self._scheduled = False  # before reading: what ends from here on schedules anew
        while self._ended and self._telling.acquire(blocking=False):
            try:
                self._tell()
            finally:
                self._telling.release()

    def detach(self) -> None:
        """The client is closed and the loop may be: the channel is closed when the last lease has ended."""
        self._detached = True
        self.flush()
        if not self._live:
            self._channel.close()

    def _arm(self) -> None:
        self._loop.call_later(_TOGETHER_S, self.flush)

    def _end(self, lease: int) -> None:
        """Runs in a finalizer: it never waits and never raises."""
        self._ended.append(lease)
        if self._detached:
            self.flush()
        elif not self._scheduled:
            self._scheduled = True
            with contextlib.suppress(
                RuntimeError
            ):  # the loop was closed before the client: the lease ends with the process
                self._loop.call_soon_threadsafe(self._arm)

    def _tell(self) -> None:
        ended: list[int] = []
        while self._ended:
            ended.append(self._ended.popleft())
        with contextlib.suppress(PlaneLostError):
            self._channel.tell(ReleaseLeases(tuple(ended)))
        self._live.difference_update(ended)
        if self._detached and not self._live:
            self._channel.close()
