"""What a server has done so far, counted where it happens. Pure; a few hundred nanoseconds per request."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import msgspec

from rl_protocol.errors import RLError
from rl_protocol.wire import Header
from rl_transferqueue.messages import ColumnCount, OperationCount

_header_decoder = msgspec.msgpack.Decoder(Header)


@dataclass(slots=True)
class _Operation:
    requests: int = 0
    nanoseconds: int = 0
    longest: int = 0
    bytes_received: int = 0


@dataclass(slots=True)
class ServerTally:
    """Requests by operation, errors by class, and bytes sent."""

    bytes_sent: int = 0
    _operations: dict[str, _Operation] = field(default_factory=dict[str, _Operation])
    _errors: dict[str, int] = field(default_factory=dict[str, int])

    def served(self, operation: str, nanoseconds: int, nbytes: int) -> None:
        """A request of `nbytes` bytes took the server this long; waiting for others is not counted."""
        entry = self._operations.get(operation)
        if entry is None:
            entry = self._operations[operation] = _Operation()
        entry.requests += 1
        entry.nanoseconds += nanoseconds
        entry.longest = max(entry.longest, nanoseconds)
        entry.bytes_received += nbytes

    def failed(self, error: RLError) -> None:
        """A request was answered with an error."""
        name = type(error).__name__
        self._errors[name] = self._errors.get(name, 0) + 1

    def operations(self) -> dict[str, OperationCount]:
        """By message type, in order of first use."""
        return {
            name: OperationCount(entry.requests, entry.nanoseconds, entry.longest, entry.bytes_received)
            for name, entry in self._operations.items()
        }

    def errors(self) -> dict[str, int]:
        """By class name."""
        return dict(self._errors)


@dataclass(slots=True)
class ColumnTally:
    """Rows and bytes that were put, and rows that were located for readers, by column."""

    _written: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    _located: dict[str, int] = field(default_factory=dict[str, int])

    def put(self, header: bytes) -> None:
        """A block with this header (msgpack of `wire.Header`) was committed."""
        rows, sizes = _sizes(header)
        for name, nbytes in sizes:
            entry = self._written.setdefault(name, [0, 0])
            entry[0] += rows
            entry[1] += nbytes

    def located(self, fields: tuple[str, ...], rows: int) -> None:
        """These columns of so many rows were handed to a reader."""
        for name in fields:
            self._located[name] = self._located.get(name, 0) + rows

    def columns(self) -> dict[str, ColumnCount]:
        """By column name."""
        names = dict.fromkeys((*self._written, *self._located))
        return {
            name: ColumnCount(*self._written.get(name, (0, 0)), rows_located=self._located.get(name, 0))
            for name in names
        }


@lru_cache(maxsize=1024)
def _sizes(header: bytes) -> tuple[int, tuple[tuple[str, int], ...]]:
    spec = _header_decoder.decode(header)
    return spec.rows, tuple((column.name, sum(size for _, size in column.buffers)) for column in spec.columns)
