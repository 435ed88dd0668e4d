"""Reads parquet files and saved data sets, and stores prepared prompts in Arrow files.

The only module that imports pyarrow and datasets (extra `data`).
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rl_protocol import SchemaError

BATCH_ROWS = 256
_BUFFER_BYTES = 1 << 20
_PROMPTS = pa.schema(
    [
        ("prompt_ids", pa.list_(pa.int32())),
        ("data_source", pa.string()),
        ("ground_truth", pa.string()),
        ("extra_info", pa.binary()),
        ("images", pa.list_(pa.string())),
        ("agent", pa.string()),
    ]
)

Raw = dict[str, Any] | SchemaError
"""A row, or the error of a row that can't be read."""


def parquet_rows(path: Path) -> Iterator[Raw]:
    """Rows of a parquet file, read in pieces, so memory use does not grow with the file.

    Raises:
        SchemaError: the rest of the file can't be read.
    """
    try:
        with pq.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:
            for batch in file.iter_batches(BATCH_ROWS, use_threads=False):
                yield from _rows(batch)
    except (pa.ArrowException, OSError) as error:
        raise SchemaError(f"not a whole parquet file: {' '.join(str(error).split()).rstrip('.')}") from error


def saved_rows(folder: Path) -> Iterator[Raw]:
    """Rows of a folder written by `Dataset.save_to_disk`, memory-mapped.

    Raises:
        SchemaError: it holds no such data set.
    """
    from datasets import load_from_disk  # takes a second to import

    try:
        data: Any = load_from_disk(str(folder))
        for batch in data.with_format("arrow").iter(BATCH_ROWS):
            for piece in batch.to_batches():
                yield from _rows(piece)
    except (pa.ArrowException, OSError, AttributeError) as error:
        raise SchemaError(f"not a data set written by save_to_disk: {str(error).rstrip('.')}") from error


def _rows(batch: Any) -> Iterator[Raw]:
    try:
        yield from batch.to_pylist()
    except (ValueError, OverflowError):
        for i in range(batch.num_rows):
            yield _row(batch.slice(i, 1))


def _row(single: Any) -> Raw:
    try:
        return single.to_pylist()[0]
    except UnicodeDecodeError as error:
        return SchemaError(f"its text is not UTF-8: {error}")
    except (ValueError, OverflowError) as error:
        return SchemaError(f"it has a value that Python can't express, such as a date after the year 9999: {error}")


class PromptWriter:
    """Appends prompts to an Arrow file; `prompt_writer` opens one."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write rows with all fields of `_PROMPTS`; `extra_info` is encoded, `images` are paths."""
        self._writer.write_table(pa.Table.from_pylist(list(rows), schema=_PROMPTS))


@contextmanager
def prompt_writer(path: Path) -> Generator[PromptWriter]:
    """Create an Arrow file of prompts."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, _PROMPTS) as writer:
        yield PromptWriter(writer)


class PromptTable:
    """Memory-mapped prompts of an Arrow file that `prompt_writer` wrote.

    Processes share the pages, and only accessed pages are read. Pages are released regularly, so
    the resident memory does not grow with the number of rows accessed; they stay in the page cache.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        with pa.ipc.open_stream(pa.py_buffer(self._map)) as reader:
            self._batches = list(reader)
        self._starts = list(accumulate((batch.num_rows for batch in self._batches), initial=0))
        self._accessed = 0

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, row: int) -> dict[str, Any]:
        """The fields of a row, as written.

        Raises:
            IndexError: there is no such row.
        """
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        if self._accessed % BATCH_ROWS == 0:
            self._map.madvise(mmap.MADV_DONTNEED)
        self._accessed += 1
        place = bisect_right(self._starts, row) - 1
        return self._batches[place].slice(row - self._starts[place], 1).to_pylist()[0]
