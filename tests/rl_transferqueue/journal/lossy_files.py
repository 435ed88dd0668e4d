"""Segment files in memory that lose what was not synced: a power loss for tests."""

from __future__ import annotations

import errno
import random

SECTOR = 512


class PowerLossError(Exception):
    """The power is gone in the middle of an operation."""


class _Inode:
    def __init__(self) -> None:
        self.now = bytearray()
        self.durable = bytearray()


class LossyFiles:
    """See `SegmentFiles`. The power goes before operation `operations`, counted from 0."""

    def __init__(self, capacity: int = 1 << 40) -> None:
        self.operations = 1 << 60
        self.capacity = capacity
        self.broken_sync = False
        self._names: dict[str, _Inode] = {}
        self._durable_names: dict[str, _Inode] = {}

    def create(self, name: str, nbytes: int) -> None:
        self._step()
        assert name not in self._names
        if nbytes > self.free():
            raise OSError(errno.ENOSPC, "No space left on device")
        inode = self._names[name] = _Inode()
        inode.now = bytearray(nbytes)

    def write(self, name: str, offset: int, data: bytes | bytearray | memoryview) -> None:
        inode = self._names[name]
        rest = bytes(data)
        assert offset + len(rest) <= len(inode.now)
        try:
            self._step()
        except PowerLossError:
            rest = rest[: len(rest) // 2]
            inode.now[offset : offset + len(rest)] = rest
            raise
        inode.now[offset : offset + len(rest)] = rest

    def sync(self, name: str) -> None:
        self._step()
        if self.broken_sync:
            raise OSError(errno.EIO, "Input/output error")
        self._names[name].durable = bytearray(self._names[name].now)

    def sync_folder(self) -> None:
        self._step()
        self._durable_names = dict(self._names)

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        return bytes(self._inode(name).now[offset : offset + nbytes])

    def size(self, name: str) -> int:
        return len(self._inode(name).now)

    def truncate(self, name: str, nbytes: int) -> None:
        self._step()
        del self._names[name].now[nbytes:]

    def remove(self, name: str) -> None:
        self._step()
        del self._names[name]

    def names(self) -> list[str]:
        return sorted(self._names)

    def free(self) -> int:
        return self.capacity - sum(len(inode.now) for inode in self._names.values())

    def close(self) -> None:
        pass

    def after_power_loss(self, rng: random.Random) -> LossyFiles:
        """What the disk holds then: of everything that was not synced, any part, by sector."""
        found = type(self)(self.capacity)
        for name in sorted({**self._names, **self._durable_names}):
            inode, durable = self._names.get(name), self._durable_names.get(name)
            kept = inode if inode is durable else rng.choice([inode, durable])
            if kept is not None:
                copy = found._names[name] = _Inode()
                copy.now = _torn(kept, rng)
                copy.durable = bytearray(copy.now)
        found._durable_names = dict(found._names)
        return found

    def _inode(self, name: str) -> _Inode:
        if name not in self._names:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", name)
        return self._names[name]

    def _step(self) -> None:
        self.operations -= 1
        if self.operations < 0:
            raise PowerLossError


class WithoutPayloadSync(LossyFiles):
    """A mutant: the sync of a file does nothing."""

    def sync(self, name: str) -> None:
        self._step()


class WithoutFolderSync(LossyFiles):
    """A mutant: the sync of the folder does nothing."""

    def sync_folder(self) -> None:
        self._step()


def _torn(inode: _Inode, rng: random.Random) -> bytearray:
    size = len(rng.choice([inode.now, inode.durable]))
    now, durable = (bytes(data[:size]).ljust(size, b"\0") for data in (inode.now, inode.durable))
    return bytearray().join(rng.choice([now, durable])[at : at + SECTOR] for at in range(0, size, SECTOR))
