"""Segments on a disk that loses power."""

from __future__ import annotations

import errno

from lossy_disk import Inode, LossyDisk, PowerLossError


class LossyFiles:
    """See `SegmentFiles`."""

    def __init__(self, disk: LossyDisk, capacity: int = 1 << 40) -> None:
        self.disk = disk
        self.capacity = capacity
        self.broken_sync = False
        self._folder = disk.payload

    def create(self, name: str, nbytes: int) -> None:
        self.disk.step()
        assert name not in self._folder.names
        if nbytes > self.free():
            raise OSError(errno.ENOSPC, "No space left on device")
        inode = self._folder.names[name] = Inode()
        inode.resize(nbytes)

    def write(self, name: str, offset: int, data: bytes | bytearray | memoryview) -> None:
        inode, rest = self._folder.find(name), bytes(data)
        assert offset + len(rest) <= len(inode.now)
        try:
            self.disk.step()
        except PowerLossError:
            inode.write(offset, rest[: len(rest) // 2])
            raise
        inode.write(offset, rest)

    def sync(self, name: str) -> None:
        self.disk.step()
        if self.broken_sync:
            raise OSError(errno.EIO, "Input/output error")
        if self.disk.without != "payload":
            self._folder.find(name).sync()

    def sync_folder(self) -> None:
        self.disk.step()
        if self.disk.without != "segment names":
            self._folder.sync()

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        return bytes(self._folder.find(name).now[offset : offset + nbytes])

    def size(self, name: str) -> int:
        return len(self._folder.find(name).now)

    def truncate(self, name: str, nbytes: int) -> None:
        self.disk.step()
        self._folder.find(name).resize(nbytes)

    def remove(self, name: str) -> None:
        self.disk.step()
        del self._folder.names[name]

    def names(self) -> list[str]:
        return sorted(self._folder.names)

    def free(self) -> int:
        return self.capacity - sum(len(inode.now) for inode in self._folder.names.values())

    def close(self) -> None:
        pass
