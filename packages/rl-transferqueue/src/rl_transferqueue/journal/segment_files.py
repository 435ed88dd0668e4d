"""The file operations under the segments: a port, and the disk behind it."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rl_protocol.support.disk_writes import fsync
from rl_transferqueue.journal.records import Block

PAGE = 4096
PIECE = 1 << 20
"""Bytes to write at a time: after these, the disk begins to write what is in the page cache."""
WINDOW = 8 << 20
"""Bytes that the page cache keeps of what is being written."""
MOST_OPEN = 64
"""Files that stay open; those with bytes to sync always do."""


class SegmentFiles(Protocol):
    """Files of one folder, by name. Failures are OSErrors."""

    def create(self, name: str, nbytes: int) -> None:
        """Make a file of zeros with all its space allocated; leave none on failure."""
        ...

    def write(self, name: str, offset: int, data: Block) -> None:
        """Write all of `data`, after what was written before: at most `PIECE` bytes, so that the
        disk begins early."""
        ...

    def sync(self, name: str) -> None:
        """Make the file's bytes and size durable."""
        ...

    def sync_folder(self) -> None:
        """Make created and removed names durable."""
        ...

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """Up to `nbytes` bytes; fewer at the end of the file."""
        ...

    def size(self, name: str) -> int:
        """Bytes of the file."""
        ...

    def truncate(self, name: str, nbytes: int) -> None:
        """Cut the file."""
        ...

    def remove(self, name: str) -> None:
        """Delete the file."""
        ...

    def names(self) -> list[str]:
        """Names of the files."""
        ...

    def free(self) -> int:
        """Bytes that can still be allocated."""
        ...

    def close(self) -> None:
        """Close every file."""
        ...


@dataclass(slots=True)
class _Cached:
    """Bytes of a file that may be in the page cache: from `start` to `end`. The disk writes those
    before `begun`."""

    start: int
    begun: int
    end: int

    def begin_to_write(self, handle: int) -> None:
        """Begin to write the changed pages, and drop those that are written."""
        self.begun = self.end // PAGE * PAGE  # the last page stays: the next write begins in it
        start = max(self.start, self.begun - WINDOW)
        os.posix_fadvise(handle, start, self.begun - start, os.POSIX_FADV_DONTNEED)  # does both

    def drop(self, handle: int) -> None:
        """Drop pages, which are all written."""
        end = self.end // PAGE * PAGE
        os.posix_fadvise(handle, self.start, end - self.start, os.POSIX_FADV_DONTNEED)
        self.start = self.begun = end


class DiskFiles:
    """Files of a folder on disk.

    The disk writes while later bytes are copied to the page cache, and what it has written leaves
    the page cache: a plane has these bytes in its arenas, and memory for cached pages is what
    writes of many bytes wait for.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, int] = {}
        """The one used last is the last."""
        self._unsynced: set[str] = set()
        """Written since their last sync. They stay open: the kernel reports a failed write only to
        descriptors that were open then."""
        self._cached: dict[str, _Cached] = {}
        """By file."""

    def create(self, name: str, nbytes: int) -> None:
        path = self._folder / name
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(handle, 0, nbytes)
        except OSError:
            os.close(handle)
            path.unlink()
            raise
        self._keep(name, handle)

    def write(self, name: str, offset: int, data: Block) -> None:
        rest = memoryview(data).cast("B")
        handle = self._handle(name)
        self._unsynced.add(name)
        cached = self._cached.setdefault(name, _Cached(offset, offset, offset))
        while rest.nbytes:
            done = os.pwrite(handle, rest, offset)
            offset += done
            rest = rest[done:]
        cached.end = offset
        if cached.end - cached.begun >= PIECE:
            cached.begin_to_write(handle)

    def sync(self, name: str) -> None:
        handle = self._handle(name)
        os.fdatasync(handle)
        self._unsynced.discard(name)
        cached = self._cached.get(name)
        if cached is not None and cached.end - cached.start >= PIECE:
            cached.drop(handle)

    def sync_folder(self) -> None:
        fsync(self._folder)

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        parts: list[bytes] = []
        while nbytes:
            part = os.pread(self._handle(name), nbytes, offset)
            if not part:
                break
            parts.append(part)
            offset += len(part)
            nbytes -= len(part)
        return b"".join(parts)

    def size(self, name: str) -> int:
        return os.fstat(self._handle(name)).st_size

    def truncate(self, name: str, nbytes: int) -> None:
        os.ftruncate(self._handle(name), nbytes)

    def remove(self, name: str) -> None:
        self._cached.pop(name, None)
        self._unsynced.discard(name)
        handle = self._open.pop(name, None)
        if handle is not None:
            os.close(handle)
        (self._folder / name).unlink()

    def names(self) -> list[str]:
        return sorted(entry.name for entry in self._folder.iterdir())

    def free(self) -> int:
        stats = os.statvfs(self._folder)
        return stats.f_bavail * stats.f_frsize

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for handle in self._open.values():
                stack.callback(os.close, handle)
        self._open.clear()

    def _handle(self, name: str) -> int:
        handle = self._open.pop(name, None)
        if handle is None:
            handle = os.open(self._folder / name, os.O_RDWR | os.O_CLOEXEC)
        self._keep(name, handle)
        return handle

    def _keep(self, name: str, handle: int) -> None:
        """Keep the file open, and close those that were used longest ago."""
        self._open[name] = handle
        for old in list(self._open)[:-MOST_OPEN]:
            if old not in self._unsynced:
                os.close(self._open.pop(old))
