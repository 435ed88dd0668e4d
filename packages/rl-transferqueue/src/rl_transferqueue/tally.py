"""What a server has done so far, counted where it happens. Pure; a few hundred nanoseconds per request."""

from __future__ import annotations

from dataclasses import dataclass, field

from rl_protocol.errors import RLError
from rl_transferqueue.header_cache import HeaderCache, unpack_header
from rl_transferqueue.messages import ColumnCount, OperationCount

OTHER_COLUMNS = "(other columns)"
"""Counts together the columns that have no count of their own."""
_COLUMNS = 4096
"""Columns with a count of their own, at most; a name that is longer than ..."""
_NAME = 256
"""... so many characters has none either."""


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
class _Column:
    rows_written: int = 0
    bytes_written: int = 0
    rows_located: int = 0


@dataclass(slots=True)
class ColumnTally:
    """Rows and bytes that were put, and rows that were located for readers, by column; see `OTHER_COLUMNS`."""

    _columns: dict[str, _Column] = field(default_factory=dict[str, _Column])

    def put(self, header: bytes) -> None:
        """A block with this header (msgpack of `wire.Header`) was committed."""
        rows, sizes = _sizes(header)
        for name, nbytes in sizes:
            entry = self._columns.get(name) or self._new(name)
            entry.rows_written += rows
            entry.bytes_written += nbytes

    def located(self, fields: tuple[str, ...], rows: int) -> None:
        """These columns of so many rows were handed to a reader."""
        for name in fields:
            entry = self._columns.get(name) or self._new(name)
            entry.rows_located += rows

    def columns(self) -> dict[str, ColumnCount]:
        """By column name."""
        return {
            name: ColumnCount(entry.rows_written, entry.bytes_written, entry.rows_located)
            for name, entry in self._columns.items()
        }

    def _new(self, name: str) -> _Column:
        own = len(self._columns) < _COLUMNS and len(name) <= _NAME
        return self._columns.setdefault(name if own else OTHER_COLUMNS, _Column())


def _measure(header: bytes) -> tuple[int, tuple[tuple[str, int], ...]]:
    spec = unpack_header(header)
    return spec.rows, tuple((column.name, sum(size for _, size in column.buffers)) for column in spec.columns)


_sizes = HeaderCache(_measure)
"""Rows, and bytes by column."""
