"""Append-only files of a record: JSON lines, compressed by blocks, so that `zcat` shows them."""

from __future__ import annotations

import contextlib
import gzip
import logging
import os
import threading
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from rl_trainer.record.record_rows import RecordRow
from rl_trainer.record.redaction import Redaction

logger = logging.getLogger(__name__)
SUFFIX = ".jsonl.gz"
DRIVER = "driver"
"""Name of the process whose files begin with a StartRow: it has one for each attempt."""
GATHER_S = 1.0
"""Rows of so many seconds are written as one block: compute threads are interrupted seldom."""
_LEVEL = 4
_GZIP = 31
"""wbits of zlib for a gzip member."""
_PIECE = 1 << 20
"""Bytes of a file that are read at once."""


class RecordFile:
    """Writes rows from a thread, each block as one gzip member with one system call.

    A process that is killed loses at most the rows of the last GATHER_S seconds. A file that can't
    be written causes a warning and gets no more rows; the run continues. Values of secret
    environment variables are replaced by their names.

    Lifecycle: the first `append` creates a new file, also beside one of an earlier attempt; `close`
    writes what is left.

    Args:
        folder: where the record is.
        name: of the process that writes.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self._redaction = Redaction()
        self._waiting: list[Callable[[], Sequence[RecordRow]]] = []
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def append(self, rows: Sequence[RecordRow]) -> None:
        """Let the thread write the rows."""
        self.append_later(lambda: rows)

    def append_later(self, make: Callable[[], Sequence[RecordRow]]) -> None:
        """Write the rows that `make` returns; the thread that writes calls it."""
        with self._changed:
            if self._closed:
                return
            self._waiting.append(make)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"record-{self._name}", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Write what is left; safe to call twice."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            with contextlib.closing(_Appended(self._folder, self._name)) as file:
                for waiting in self._blocks():
                    lines = msgspec.json.Encoder().encode_lines([row for make in waiting for row in make()])
                    file.write(gzip.compress(self._redaction.clean(lines), _LEVEL))
        except OSError as error:
            logger.warning("the record of %s ends here, since it can't be written: %s", self._name, error)
            with self._changed:
                self._closed = True

    def _blocks(self) -> Generator[list[Callable[[], Sequence[RecordRow]]]]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._closed:
                    self._changed.wait_for(lambda: self._closed, GATHER_S)
                waiting, self._waiting = self._waiting, []
                closed = self._closed
            if waiting:
                yield waiting
            if closed:
                return


class _Appended:
    """A new file to append to: NAME.jsonl.gz, or NAME.2.jsonl.gz where that exists."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        number = 1
        while True:
            path = folder / f"{name}{'' if number == 1 else f'.{number}'}{SUFFIX}"
            with contextlib.suppress(FileExistsError):
                self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
                return
            number += 1

    def write(self, block: bytes) -> None:
        left = memoryview(block)
        while left:
            left = left[os.write(self._file, left) :]

    def close(self) -> None:
        os.close(self._file)


def read_file(path: Path, begin: int = 0) -> tuple[list[RecordRow], int]:
    """The rows of all whole blocks of a file from `begin`, and where they end; see read_blocks."""
    rows: list[RecordRow] = []
    for block, end in read_blocks(path, begin):
        rows += block
        begin = end
    return rows, begin


def read_blocks(path: Path, begin: int = 0) -> Iterator[tuple[list[RecordRow], int]]:
    """The rows of each whole block of a file from `begin`, and where the block ends.

    The file may be growing, or cut anywhere. One block is in memory at a time.

    Raises:
        OSError: the file can't be read.
        msgspec.DecodeError: a whole block holds something else.
    """
    decoder = msgspec.json.Decoder(RecordRow)
    with path.open("rb") as file:
        file.seek(begin)
        for block, size in _whole_blocks(file):
            begin += size
            yield decoder.decode_lines(block), begin


def _whole_blocks(file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Each block, and the bytes that it takes in the file; a torn one ends them."""
    inflate, parts, size = zlib.decompressobj(_GZIP), list[bytes](), 0
    data = b""
    while data := data or file.read(_PIECE):
        try:
            parts.append(inflate.decompress(data))
        except zlib.error:
            return
        size += len(data) - len(inflate.unused_data)
        data = inflate.unused_data
        if inflate.eof:
            yield b"".join(parts), size
            inflate, parts, size = zlib.decompressobj(_GZIP), [], 0
