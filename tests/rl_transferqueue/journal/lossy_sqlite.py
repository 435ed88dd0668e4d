"""SQLite on a disk that loses power: a virtual file system of SQLite over `LossyDisk`."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import apsw
from lossy_disk import Inode, LossyDisk, PowerLossError

from rl_transferqueue.journal.metadata import VERSION

_numbers = itertools.count()
_SYNC_THEIR_NAMES = apsw.SQLITE_OPEN_WAL | apsw.SQLITE_OPEN_MAIN_JOURNAL
DATABASE = "metadata.sqlite"
_MUTANTS = {
    "commit": {"PRAGMA synchronous=FULL": "PRAGMA synchronous=NORMAL"},
    "opening": {f"PRAGMA user_version={VERSION}": "PRAGMA user_version"},
}
"""Name of the sync that is left out -> statements and what is executed instead."""


class _File:
    """An open file; the operations are those of SQLite's `unix` file system.

    Locks are not needed, because a journal has one connection. Without power nothing changes, and
    `_Connection` raises: SQLite would ignore some errors of a file system.
    """

    def __init__(self, disk: LossyDisk, inode: Inode, *, unnamed: bool) -> None:
        self._disk = disk
        self._inode = inode
        self._unnamed = unnamed

    def xRead(self, amount: int, offset: int) -> bytes:
        return bytes(self._inode.now[offset : offset + amount])

    def xWrite(self, data: bytes, offset: int) -> None:
        self._disk.powered()
        if self._disk.operations >= -1:  # the last write may be torn
            self._inode.write(offset, bytes(data))

    def xTruncate(self, size: int) -> None:
        if self._disk.powered():
            self._inode.resize(size)

    def xSync(self, _flags: int) -> None:
        if not self._disk.powered():
            return
        self._inode.sync()
        if self._unnamed and self._disk.without != "log name":
            self._disk.metadata.sync()
            self._unnamed = False

    def xFileSize(self) -> int:
        return len(self._inode.now)

    def xLock(self, _level: int) -> None: ...

    def xUnlock(self, _level: int) -> None: ...

    def xCheckReservedLock(self) -> bool:
        return False

    def xFileControl(self, _op: int, _pointer: int) -> bool:
        return False

    def xSectorSize(self) -> int:
        return 4096

    def xDeviceCharacteristics(self) -> int:
        return apsw.SQLITE_IOCAP_POWERSAFE_OVERWRITE

    def xClose(self) -> None: ...


class _FileSystem(apsw.VFS):
    def __init__(self, name: str, disk: LossyDisk) -> None:
        self._disk = disk
        super().__init__(name, base="unix")

    def xFullPathname(self, name: str) -> str:
        return name

    def xAccess(self, name: str, _flags: int) -> bool:
        return name in self._disk.metadata.names

    def xDelete(self, name: str, sync_folder: bool) -> None:
        if not self._disk.powered():
            return
        del self._disk.metadata.names[name]
        if sync_folder:
            self._disk.metadata.sync()

    def xOpen(self, name: Any, flags: list[int]) -> _File:
        path = name if isinstance(name, str) else name.filename()
        found = self._disk.metadata.names.get(path)
        inode = found or Inode()
        if found is None:
            assert flags[0] & apsw.SQLITE_OPEN_CREATE, f"{path} is not there"
            if self._disk.powered():
                self._disk.metadata.names[path] = inode
        flags[1] = flags[0]
        return _File(self._disk, inode, unnamed=bool(flags[0] & _SYNC_THEIR_NAMES))


class _Connection:
    """See `Connection` of `rl_transferqueue.journal.metadata`."""

    def __init__(self, connection: apsw.Connection, disk: LossyDisk) -> None:
        self._connection = connection
        self._disk = disk

    @property
    def in_transaction(self) -> bool:
        return self._connection.in_transaction

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> Iterator[Any]:
        sql = _MUTANTS.get(self._disk.without, {}).get(sql, sql)
        with self._powered():
            return iter(list(self._connection.execute(sql, parameters)))

    def executemany(self, sql: str, parameters: Iterable[Sequence[Any]]) -> Iterator[Any]:
        with self._powered():
            return iter(list(self._connection.executemany(sql, parameters)))

    def close(self) -> None:
        with self._powered():
            self._connection.close()

    @contextmanager
    def _powered(self) -> Generator[None]:
        try:
            yield
        except apsw.Error:
            if self._disk.operations >= 0:
                raise
        if self._disk.operations < 0:
            raise PowerLossError


@contextmanager
def connect(disk: LossyDisk) -> Generator[_Connection]:
    """A connection, whose log is copied to the database after few pages.

    It is closed at the end, with the operations of an orderly end if there is still power.
    """
    name = f"lossy-{next(_numbers)}"
    system = _FileSystem(name, disk)
    try:
        connection = apsw.Connection(DATABASE, vfs=name)
        try:
            connection.wal_autocheckpoint(6)
            yield _Connection(connection, disk)
        finally:
            connection.close(True)
    finally:
        system.unregister()
