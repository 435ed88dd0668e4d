"""Rows and bytes written and located, by column."""

from __future__ import annotations

from dataclasses import dataclass, field

from rl_transferqueue.wire.header_cache import HeaderCache, unpack_header
from rl_transferqueue.wire.messages import ColumnCount

OTHER_COLUMNS = "(other columns)"
"""Name under which columns without a separate count are counted together."""
_COLUMNS = 4096
"""Most columns with a separate count; a name that is longer than ..."""
_NAME = 256
"""... so many characters has none."""


@dataclass(slots=True)
class _Column:
    rows_written: int = 0
    bytes_written: int = 0
    rows_located: int = 0


@dataclass(slots=True)
class ColumnCounters:
    """Rows and bytes that were put, and rows that were located for readers, by column."""

    _columns: dict[str, _Column] = field(default_factory=dict[str, _Column])

    def put(self, header: bytes) -> None:
        """Count a committed block with this header (msgpack of `wire.Header`)."""
        rows, sizes = _sizes(header)
        for name, nbytes in sizes:
            entry = self._columns.get(name) or self._new(name)
            entry.rows_written += rows
            entry.bytes_written += nbytes

    def located(self, fields: tuple[str, ...], rows: int) -> None:
        """Count columns of rows that were located for a reader."""
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
