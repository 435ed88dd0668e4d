"""The file operations under the segments: a port, and the disk behind it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Protocol

from rl_protocol.support.disk_writes import fsync
from rl_transferqueue.journal.records import Block

PAGE = 4096
UNCACHE = 1 << 20
"""Bytes that are dropped from the page cache together."""


class SegmentFiles(Protocol):
    """Files of one folder, by name. Failures are OSErrors."""

    def create(self, name: str, nbytes: int) -> None:
        """Make a file of zeros with all its space allocated; leave none on failure."""
        ...

    def write(self, name: str, offset: int, data: Block) -> None:
        """Write all of `data`."""
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


class DiskFiles:
    """Files of a folder on disk. Synced bytes leave the page cache: a plane has them in its arenas,
    and memory for cached pages is what writes of many bytes wait for.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, int] = {}
        self._cached: dict[str, tuple[int, int]] = {}
        """First and last written byte that is in the page cache, by file."""

    def create(self, name: str, nbytes: int) -> None:
        path = self._folder / name
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(handle, 0, nbytes)
        except OSError:
            os.close(handle)
            path.unlink()
            raise
        self._open[name] = handle

    def write(self, name: str, offset: int, data: Block) -> None:
        rest = memoryview(data).cast("B")
        start, end = self._cached.get(name, (offset, offset))
        self._cached[name] = min(start, offset), max(end, offset + rest.nbytes)
        while rest.nbytes:
            done = os.pwrite(self._handle(name), rest, offset)
            offset += done
            rest = rest[done:]

    def sync(self, name: str) -> None:
        handle = self._handle(name)
        os.fdatasync(handle)
        start, end = self._cached.get(name, (0, 0))
        if end - start >= UNCACHE:  # the last page stays: the next write begins in it
            os.posix_fadvise(handle, start, end // PAGE * PAGE - start, os.POSIX_FADV_DONTNEED)
            del self._cached[name]

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
        if name not in self._open:
            self._open[name] = os.open(self._folder / name, os.O_RDWR | os.O_CLOEXEC)
        return self._open[name]
