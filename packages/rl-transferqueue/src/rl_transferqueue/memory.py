"""How a client reaches the memory of a plane: here through the arenas' pages, from elsewhere in ways of other modules."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np

from rl_protocol.batch import BatchData
from rl_protocol.columns import AnyArray
from rl_protocol.wire import Header, read_payload, write_payload
from rl_transferqueue.arena import Entered, map_arena
from rl_transferqueue.descriptor import UnitAddress
from rl_transferqueue.header_cache import unpack_header
from rl_transferqueue.leases import Anchor
from rl_transferqueue.messages import Located, Span
from rl_transferqueue.reader import Piece, assemble, pieces_of
from rl_transferqueue.table import Ints

T = TypeVar("T")

_OFF_LOOP_BYTES = 8 << 20
"""From this size on memory is copied in a thread, so that the loop goes on."""


class PlaneMemory(Protocol):
    """The memory of all units. A call returns or raises, also when it is cancelled, only once nothing touches the memory any more."""

    def draft(self, span: Span, nbytes: int) -> AnyArray:
        """Writable bytes for what will lie in `span`."""
        ...

    async def finish(self, span: Span, header: Header, batch: BatchData, timeout_s: float) -> None:
        """Bring what was written to the memory of `draft` to its span.

        Raises:
            PlaneTimeout, PlaneLostError: as their names say.
        """
        ...

    async def write(self, span: Span, header: Header, data: BatchData, timeout_s: float) -> None:
        """Copy the columns to a span that this session has reserved.

        Raises:
            PlaneTimeout, PlaneLostError: as their names say; the span holds anything.
        """
        ...

    async def read(self, located: Located, fields: Sequence[str], anchor: Anchor, timeout_s: float) -> BatchData:
        """The columns. What still refers to the memory of a unit keeps `anchor`, so its block stays as it is.

        Raises:
            PlaneTimeout, PlaneLostError: as their names say.
        """
        ...

    def abandon(self, span: Span) -> bool:
        """The session is about to give the span back; whether bytes may still be on their way to it."""
        ...

    def close(self) -> None:
        """Calls under way fail; batches that were read stay valid."""
        ...


class Writes:
    """Writes to reserved memory that are under way: each is a `with` block."""

    def __init__(self) -> None:
        self._count = 0
        self._none = asyncio.Event()
        self._none.set()

    def __enter__(self) -> None:
        self._count += 1
        self._none.clear()

    def __exit__(self, *_: object) -> None:
        self._count -= 1
        if not self._count:
            self._none.set()

    async def ended(self) -> None:
        """Wait until none is under way."""
        await self._none.wait()


class _Anchored(np.ndarray):
    """Memory that keeps an object alive whose end says that nobody looks at the memory any more."""

    anchor: object


def anchored(memory: mmap.mmap, start: int, nbytes: int, anchor: object) -> memoryview:
    """Part of a mapping; whatever is made from it keeps the anchor."""
    array = np.frombuffer(memory, np.uint8, nbytes, start).view(_Anchored)
    array.anchor = anchor
    return array.data


async def copying(nbytes: int, copy: Callable[[], T]) -> T:
    """Copy memory, in a thread if it takes long; when cancelled wait until it is over, for nobody may get the memory before."""
    if nbytes < _OFF_LOOP_BYTES:
        return copy()
    done = asyncio.get_running_loop().run_in_executor(None, copy)
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        await asyncio.wait((done,))
        raise


class LocalMemory:
    """The arenas of the units of this host: a write is one copy, a read of rows that lie side by side none."""

    def __init__(self, units: Sequence[UnitAddress]) -> None:
        self._units = units
        self._mappings: dict[tuple[int, bool], mmap.mmap] = {}
        self._entered: dict[int, Entered] = {}
        """Per unit, which pages of the arena this process has written to."""

    def draft(self, span: Span, nbytes: int) -> AnyArray:
        """See PlaneMemory.draft."""
        return np.frombuffer(self._map(span.unit, True), np.uint8, nbytes, span.offset)

    async def finish(self, span: Span, header: Header, batch: BatchData, timeout_s: float) -> None:
        """See PlaneMemory.finish."""

    async def write(self, span: Span, header: Header, data: BatchData, timeout_s: float) -> None:
        """See PlaneMemory.write."""
        del timeout_s
        mapping = self._map(span.unit, True)
        target = memoryview(mapping)[span.offset : span.offset + header.payload]
        entered = self._entered.setdefault(span.unit, Entered())

        def write() -> None:
            entered.enter(mapping, span.offset, header.payload)
            write_payload(data, header, target)

        await copying(header.payload, write)

    async def read(self, located: Located, fields: Sequence[str], anchor: Anchor, timeout_s: float) -> BatchData:
        """See PlaneMemory.read."""
        del timeout_s

        def view(piece: Piece) -> tuple[BatchData, range | Ints]:
            header = unpack_header(piece.header)
            payload = anchored(self._map(piece.span.unit, False), piece.span.offset, header.payload, anchor)
            return read_payload(header, payload, piece.fields), piece.rows

        batch, fill, copied = assemble(pieces_of(located, fields), fields, view)
        if copied:
            await copying(copied, fill)
        return batch

    def abandon(self, span: Span) -> bool:
        """See PlaneMemory.abandon."""
        del span
        return False

    def close(self) -> None:
        """See PlaneMemory.close."""
        self._mappings.clear()

    def _map(self, unit: int, writable: bool) -> mmap.mmap:
        mapping = self._mappings.get((unit, writable))
        if mapping is None:
            mapping = self._mappings[unit, writable] = map_arena(self._units[unit], writable=writable)
        return mapping
