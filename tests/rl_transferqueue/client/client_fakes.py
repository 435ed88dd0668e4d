"""A fake controller and a fake memory to test the client's put and get without processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rl_protocol import BatchData, BatchError, PlaneLostError, dense
from rl_transferqueue.memory.build_batch import Groups
from rl_transferqueue.wire.messages import Abandon, Commit, Committed, Locate, Located, Reserve, Reserved
from rl_transferqueue.wire.spans import BlockRef, Span

BATCH = BatchData({"x": dense(np.arange(4.0))})


class FakeController:
    """Answers requests like a controller with two storage units, and records them."""

    def __init__(self) -> None:
        self.requests: list[object] = []
        self.abandoned: list[Span] = []
        self.unit = 0
        """The storage unit on which `Reserve` returns memory."""
        self.spare: Span | None = None
        """The reservation that the next `Commit` returns, if any."""
        self.unsendable: BatchError | None = None
        """The error of the next `Commit`, if it can't be sent."""
        self.lost = ""
        self.era = 0
        self._offset = 0

    def check(self) -> None:
        if self.lost:
            raise PlaneLostError(self.lost)

    def start(self, request: object) -> object:
        self.requests.append(request)
        if isinstance(request, Commit) and self.unsendable is not None:
            error, self.unsendable = self.unsendable, None
            raise error
        return request

    async def finish(self, call: object, expect: type, timeout_s: float, *, takes: bool = False) -> Any:
        if isinstance(call, Reserve):
            self._offset += 4096
            return Reserved(Span(self.unit, self._offset, 4096))
        if isinstance(call, Commit):
            spare, self.spare = (self.spare, None) if call.spare else (None, self.spare)
            return Committed(np.arange(len(call.keys), dtype="<i8").tobytes(), spare)
        assert isinstance(call, Locate)
        block = BlockRef(1, Span(0, 0, 64), 1)
        rows = np.zeros(4, "<i4").tobytes(), np.arange(4, dtype="<i4").tobytes()
        return Located((block,), bytes(8), (b"header",), (0,), (rows,), (0,))

    async def call(self, request: object, expect: type, timeout_s: float, *, takes: bool = False) -> Any:
        return await self.finish(self.start(request), expect, timeout_s, takes=takes)

    def tell(self, message: object) -> int:
        assert isinstance(message, Abandon)
        self.abandoned += message.spans
        return 0

    def kinds(self) -> list[str]:
        return [type(request).__name__ for request in self.requests]


class FakeMemory:
    """A memory that calls `on_write` and `on_read`, either of which may raise."""

    def __init__(self) -> None:
        self.written: list[Span] = []
        self.on_write: Callable[[Span], None] = lambda span: None
        self.on_read: Callable[[], None] = lambda: None

    def draft(self, span: Span, nbytes: int) -> Any:
        return np.zeros(nbytes, np.uint8)

    async def finish(self, span: Span, header: object, batch: BatchData, timeout_s: float) -> None:
        await self.write(span, header, batch, timeout_s)

    async def write(self, span: Span, header: object, data: BatchData, timeout_s: float) -> None:
        self.on_write(span)
        self.written.append(span)

    async def read(self, groups: Groups, fields: Sequence[str], anchor: object, timeout_s: float) -> BatchData:
        self.on_read()
        return BATCH

    def abandon(self, span: Span) -> bool:
        return False

    def close(self) -> None:
        return
