"""PlaneMemory, the interface to the memory of all units, and how long copies run off the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias, TypeVar

from rl_protocol.batch.batch_data import BatchData
from rl_protocol.batch.columns import AnyArray
from rl_protocol.wire import Header
from rl_transferqueue.memory.anchors import Anchor
from rl_transferqueue.memory.build_batch import Groups
from rl_transferqueue.wire.messages import LinkBytes
from rl_transferqueue.wire.spans import Span

T = TypeVar("T")
OnMoved: TypeAlias = Callable[[LinkBytes], None]
"""Called with what a put or a get has moved."""

UNIT_LOSS_POLL_S = 0.005
"""Seconds between retries after a unit failed, until the controller has noticed its end too."""
_OFF_LOOP_BYTES = 8 << 20
"""Copies of at least this size run in a thread, so that the loop keeps running."""


class PlaneMemory(Protocol):
    """The memory of all units of a plane.

    A call returns or raises, also when it is cancelled, only once nothing touches the memory.
    """

    def views(self, unit: int) -> bool:
        """Whether adjacent rows of one block of the unit are read without a copy."""
        ...

    def draft(self, span: Span, nbytes: int) -> AnyArray:
        """Writable bytes for the future content of `span`."""
        ...

    async def finish(self, span: Span, header: Header, batch: BatchData, timeout_s: float) -> None:
        """Bring the content of a draft to its span.

        Raises:
            PlaneTimeout, PlaneLostError: the deadline passed; the unit has ended.
        """
        ...

    async def write(self, span: Span, header: Header, data: BatchData, timeout_s: float) -> None:
        """Copy columns to a span that this session has reserved.

        Raises:
            PlaneTimeout, PlaneLostError: the deadline passed; the unit has ended. The content of
                the span is undefined.
        """
        ...

    async def read(self, groups: Groups, fields: Sequence[str], anchor: Anchor, timeout_s: float) -> BatchData:
        """The columns `fields`, which lie in these pieces. Views of a unit's memory keep `anchor`,
        which keeps their block unchanged.

        Raises:
            PlaneTimeout, PlaneLostError: the deadline passed; the unit has ended.
        """
        ...

    def abandon(self, span: Span) -> bool:
        """Prepare to give a span back; returns whether bytes may still be on their way to it."""
        ...

    def close(self) -> None:
        """End calls under way; batches that were read stay valid."""
        ...


async def copying(nbytes: int, copy: Callable[[], T]) -> T:
    """Run `copy`, in a thread if `nbytes` is large. If cancelled, wait for it before raising.

    Nothing may reuse the memory while the copy runs.
    """
    if nbytes < _OFF_LOOP_BYTES:
        return copy()
    done = asyncio.get_running_loop().run_in_executor(None, copy)
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        await wait_through(done)
        raise


async def wait_through(done: asyncio.Future[T]) -> None:
    """Wait for the end of a thread's work, whose outcome nobody wants any more.

    A cancellation meanwhile is raised after it.
    """
    cancelled: asyncio.CancelledError | None = None
    while not done.done():
        try:
            await asyncio.wait((done,))
        except asyncio.CancelledError as error:
            cancelled = error
    if not done.cancelled():
        done.exception()  # mark it as retrieved
    if cancelled is not None:
        raise cancelled
