"""Payload: append-only segments, allocated one ahead, with a digest per block."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import xxhash

from rl_protocol.errors import OutputError
from rl_transferqueue.journal.records import Block
from rl_transferqueue.journal.segment_files import PIECE, SegmentFiles

SECTOR = 512
"""What a disk writes at once. Bytes written after a sync start a new sector, so that a torn write
can't harm synced bytes."""
ALIGN = 64
SCAN = 1 << 20
NAME = re.compile(r"segment-(\d{12})")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a block lies, and its xxh3-128."""

    segment: int
    offset: int
    nbytes: int
    digest: bytes


@dataclass(slots=True)
class _Segment:
    number: int
    nbytes: int
    used: int = 0


def rounded(nbytes: int, align: int) -> int:
    """The next multiple of `align`."""
    return -(-nbytes // align) * align


def segment_name(number: int) -> str:
    """File name of a segment."""
    return f"segment-{number:012d}"


class Segments:
    """Writes blocks to the newest segment. The next one is allocated before it is needed, so a full
    disk shows while the caller can still refuse the data."""

    def __init__(self, files: SegmentFiles, where: str, segment_bytes: int) -> None:
        self._files = files
        self._where = where
        self._segment_bytes = rounded(segment_bytes, SECTOR)
        self._number = 0
        self._active: _Segment | None = None
        self._next: _Segment | None = None
        self._unsynced: set[int] = set()
        self._unnamed = False

    @property
    def in_use(self) -> frozenset[int]:
        """Segments that are being written or kept for the next writes."""
        return frozenset(segment.number for segment in (self._active, self._next) if segment is not None)

    def write(self, blocks: Iterable[Block]) -> list[Place]:
        """Write blocks side by side; they are durable after `sync`.

        Raises:
            OutputError: no room for the next segment; nothing was written.
            OSError: the write failed.
        """
        blocks = [memoryview(block).cast("B") for block in blocks]
        if not blocks:
            return []
        active = self._reserve(sum(rounded(block.nbytes, ALIGN) for block in blocks))
        self._unsynced.add(active.number)
        places: list[Place] = []
        for block in blocks:
            digest = self._write_pieces(segment_name(active.number), active.used, block)
            places.append(Place(active.number, active.used, block.nbytes, digest))
            active.used += rounded(block.nbytes, ALIGN)
        return places

    def sync(self) -> None:
        """Make all written blocks durable, and then the names of their segments."""
        for number in sorted(self._unsynced):
            self._files.sync(segment_name(number))
        self._unsynced.clear()
        if self._unnamed:
            self._files.sync_folder()
            self._unnamed = False
        if self._active is not None:
            self._active.used = rounded(self._active.used, SECTOR)

    def read(self, place: Place) -> bytes | None:
        """The bytes of a block; None: they are missing or not those that were written."""
        name = segment_name(place.segment)
        try:
            data = self._files.read(name, place.offset, place.nbytes)
        except FileNotFoundError:
            return None
        return data if len(data) == place.nbytes and xxhash.xxh3_128_digest(data) == place.digest else None

    def size(self, number: int) -> int:
        """Bytes of a segment's file."""
        return self._files.size(segment_name(number))

    def remove(self, numbers: Iterable[int]) -> int:
        """Delete segments that no durable metadata names; returns how many."""
        wanted = set(numbers)
        chosen = sorted(wanted & self.numbers()) if wanted else []
        for number in chosen:
            self._files.remove(segment_name(number))
        if chosen:
            self._files.sync_folder()
        return len(chosen)

    def numbers(self) -> set[int]:
        """The segments in the folder."""
        return {int(match[1]) for name in self._files.names() if (match := NAME.fullmatch(name))}

    def recover(self, ends: Mapping[int, int]) -> tuple[int, int]:
        """Keep the segments of `ends`, each cut at its end; returns (bytes cut, segments removed).

        Counted as cut are the bytes up to the last that is not 0: allocated space that was never
        written is not a loss.
        """
        present = self.numbers()
        self._number = max(present | set(ends), default=-1) + 1
        cut = 0
        for number in sorted(present & set(ends)):
            name = segment_name(number)
            cut += self._written(name, ends[number])
            if self._files.size(name) > ends[number]:
                self._files.truncate(name, ends[number])
                self._files.sync(name)
        unnamed = sorted(present - set(ends))
        cut += sum(self._written(segment_name(number), 0) for number in unnamed)
        return cut, self.remove(unnamed)

    def _write_pieces(self, name: str, offset: int, block: memoryview) -> bytes:
        """Write a block; returns its digest, which is computed while the disk writes."""
        digest = xxhash.xxh3_128()
        for start in range(0, block.nbytes, PIECE):
            piece = block[start : start + PIECE]
            digest.update(piece)
            self._files.write(name, offset + start, piece)
        return digest.digest()

    def _written(self, name: str, start: int) -> int:
        stop = self._files.size(name)
        while stop > start:
            begin = max(start, stop - SCAN)
            rest = self._files.read(name, begin, stop - begin).rstrip(b"\0")
            if rest:
                return begin + len(rest) - start
            stop = begin
        return 0

    def _reserve(self, nbytes: int) -> _Segment:
        """A segment with room for `nbytes`. All allocation comes before the first change."""
        if self._active is not None and self._active.used + nbytes <= self._active.nbytes:
            return self._active
        if nbytes > self._segment_bytes:
            self._active = self._allocate(rounded(nbytes, SECTOR))
            return self._active
        if self._next is None:
            self._next = self._allocate(self._segment_bytes)
        following = self._allocate(self._segment_bytes)
        self._active, self._next = self._next, following
        return self._active

    def _allocate(self, nbytes: int) -> _Segment:
        number = self._number
        try:
            self._files.create(segment_name(number), nbytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise OutputError(
                f"The journal of the data plane in {self._where} needs {nbytes} bytes for its next segment, and {self._files.free()} "
                f"are free ({error.strerror or error}). Free space there, clear rows, or set TransferQueueConfig.journal_dir to a larger disk."
            ) from error
        self._number += 1
        self._unnamed = True
        return _Segment(number, nbytes)
