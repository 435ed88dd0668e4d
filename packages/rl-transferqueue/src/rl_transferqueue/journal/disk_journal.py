"""The journal on a disk: metadata in SQLite, payload in segments.

    append   blocks -> newest segment                       (not durable)
    sync     segments -> names of segments -> metadata      (each durable before the next)
    clear    metadata -> segments that nothing names are deleted
    compact  blocks -> newest segment -> metadata -> segments that nothing names are deleted

A put is deleted from the metadata once each of its rows is cleared, or its columns and tags are
replaced by later puts: in the transaction of the last of them.

The metadata never names a block that is not on the disk, so what a crash leaves behind is payload
that nothing names: `recover` removes it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from rl_protocol.errors import ConfigError, OutputError
from rl_protocol.support.disk_writes import fsync
from rl_protocol.support.fault_points import FaultPoint, reach
from rl_protocol.support.host.portable import uses_linux
from rl_transferqueue.journal.journal_index import Dropped, JournalIndex
from rl_transferqueue.journal.kept_answers import KeptAnswers
from rl_transferqueue.journal.metadata import Metadata, StoredPut
from rl_transferqueue.journal.records import Block, ClearRecord, FoundPut, PutRecord, Record, Recovered, RecoveryReport
from rl_transferqueue.journal.segment_files import DiskFiles, SegmentFiles
from rl_transferqueue.journal.segments import Segments
from rl_transferqueue.wire.arrays import pack_ints

SEGMENTS, METADATA, LOCK = "segments", "metadata.sqlite", "lock"
"""Names in the folder of a journal."""
_POLL_S = 0.1
SEGMENT_BYTES = 64 << 20
COMPACT_BELOW = 0.5
"""A segment whose live share is smaller is rewritten by `compact`."""
NETWORK_FILE_SYSTEMS = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs"})
"""SQLite's write-ahead log needs shared memory and locks that these do not give."""


class DiskJournal:
    """A journal in a folder; see `rl_transferqueue.journal.records.Journal`.

    Args:
        metadata: open metadata; closed with the journal.
        files: files of the segments; closed with the journal.
        where: the folder, for messages.
        segment_bytes: size of a segment. The next one is always allocated ahead.
    """

    def __init__(self, metadata: Metadata, files: SegmentFiles, where: str, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._metadata = metadata
        self._files = files
        self._where = where
        self._segments = Segments(files, where, segment_bytes)
        self._index = JournalIndex()
        self._failed: str | None = None
        self._new: dict[int, StoredPut] = {}
        self._cleared: set[int] = set()
        self._dead: set[int] = set()
        self._forgotten: set[int] = set()
        self._shrunk: set[int] = set()
        """Segments that have lost a put, and were not looked at by `compact` since."""
        self._answers = KeptAnswers()
        self._last = 0

    def append(self, records: Sequence[Record]) -> None:
        with self._fatal("append"):
            puts = [record for record in records if isinstance(record, PutRecord)]
            blocks = [block for put in puts for block in put.columns.values()]
            places = iter(self._segments.write(blocks))
            for record in records:
                if isinstance(record, ClearRecord):
                    self._clear(record)
                    continue
                stored = StoredPut(
                    self._index.next_number(),
                    replace(record, columns={}, origin=None),
                    {name: next(places) for name in record.columns},
                )
                self._last = max(self._last, *record.generations)
                if record.origin is not None:
                    self._answers.add(record.origin, pack_ints(np.array(record.generations, np.int64)))
                self._new[stored.number] = stored
                self._drop(self._index.add(stored))

    def sync(self) -> None:
        with self._fatal("sync"):
            self._segments.sync()
            reach(FaultPoint.JOURNAL_PAYLOAD_SYNCED)
            self._metadata.commit(
                self._new.values(),
                self._cleared,
                self._dead,
                self._forgotten,
                *self._answers.take_changes(),
                self._last,
            )
            self._remove_unreferenced()
            self._new, self._cleared, self._dead, self._forgotten = {}, set(), set(), set()

    def recover(self) -> Recovered:
        with self._fatal("recover"):
            stored = self._metadata.puts()
            ends: dict[int, int] = {}
            for place in (place for put in stored for place in put.places.values()):
                ends[place.segment] = max(ends.get(place.segment, 0), place.offset + place.nbytes)
            cut, removed = self._segments.recover(ends)
            broken: list[StoredPut] = []
            for put in stored:
                if self._read(put) is None:
                    broken.append(put)
                else:
                    self._drop(self._index.add(put))
            noted = self._metadata.cleared()
            self._drop(self._index.clear(noted)[1])
            whole = tuple(put.record for put in self._index.puts())
            cleared = noted & {it for record in whole for it in record.generations}
            self._last = max((it for put in stored for it in put.record.generations), default=0)
            self._last = max(self._last, self._metadata.last_generation())
            answers = self._answers.restore(self._metadata.answers())
            dead = self._dead.union(put.number for put in broken)
            self._metadata.commit(dead=dead, forgotten=noted - cleared, last=self._last if dead else 0)
            self._dead, self._forgotten, self._shrunk = set(), set(), self._index.segments()
            removed += self._segments.remove(ends.keys() - self._index.segments())
            incomplete = {it for put in broken for it in put.record.generations} - noted
            kept = {it for record in whole for it in record.generations} - cleared - incomplete
            report = RecoveryReport(
                rows_kept=len(kept),
                rows_incomplete=tuple(sorted(incomplete)),
                bytes_cut=cut,
                segments_removed=removed,
            )
            return Recovered(whole, frozenset(cleared), report, answers, self._last)

    def find(self, generations: Collection[int], wanted: Callable[[PutRecord], bool]) -> tuple[FoundPut, ...]:
        with self._fatal("find"):
            return tuple(
                FoundPut(put.number, put.record, put.nbytes, tuple(it.record for it in self._index.later(put)))
                for put in self._index.puts_of(generations)
                if wanted(put.record)
            )

    def read(self, numbers: Collection[int]) -> Mapping[int, Mapping[str, Block] | None]:
        with self._fatal("read"):
            puts = {number: self._index.put(number) for number in numbers}
            return {number: self._read(put) if put is not None else None for number, put in puts.items()}

    def compact(self) -> int:
        if not self._shrunk - self._segments.in_use:
            return 0
        self.sync()
        with self._fatal("compact"):
            shrunk = (self._shrunk & self._index.segments()) - self._segments.in_use
            self._shrunk &= self._segments.in_use
            victims = {
                number
                for number in shrunk
                if self._index.live_bytes(number) < COMPACT_BELOW * self._segments.size(number)
            }
            if not victims:
                return self._remove_unreferenced()
            moved: list[StoredPut] = []
            for put in self._index.puts_in(victims):
                columns = self._read(put)
                if columns is not None:
                    places = self._segments.write(columns.values())
                    moved.append(replace(put, places=dict(zip(put.places, places, strict=True))))
            self._segments.sync()
            reach(FaultPoint.JOURNAL_PAYLOAD_SYNCED)
            self._metadata.commit(moved)
            for put in moved:
                self._index.move(put)
            return self._remove_unreferenced()

    def close(self) -> None:
        self._metadata.close()
        self._files.close()

    def _clear(self, record: ClearRecord) -> None:
        cleared, dropped = self._index.clear(record.generations)
        self._cleared |= cleared
        self._drop(dropped)

    def _drop(self, dropped: Dropped) -> None:
        """Delete puts with the next commit."""
        for put in dropped.puts:
            self._dead.add(put.number)
            self._shrunk.update(place.segment for place in put.places.values())
        self._forgotten |= dropped.rows

    def _remove_unreferenced(self) -> int:
        """Delete segments that the durable metadata does not name."""
        unused = self._index.unreferenced() - self._segments.in_use
        removed = self._segments.remove(unused)
        self._index.forget(unused)
        return removed

    def _read(self, put: StoredPut) -> dict[str, bytes] | None:
        """The columns of a put; None: they are missing or damaged."""
        columns: dict[str, bytes] = {}
        for name, place in put.places.items():
            data = self._segments.read(place)
            if data is None:
                return None
            columns[name] = data
        return columns

    @contextmanager
    def _fatal(self, what: str) -> Generator[None]:
        """An error of the disk ends the journal: what was written is unknown after it."""
        if self._failed is not None:
            raise OutputError(self._failed)
        try:
            yield
        except OutputError:
            raise
        except (OSError, sqlite3.Error) as error:
            self._failed = (
                f"The journal of the data plane in {self._where} failed during {what}: {error}. It takes nothing more; "
                f"{self._files.free()} bytes are free there. Repair the disk of TransferQueueConfig.journal_dir and start again."
            )
            raise OutputError(self._failed) from error


@contextmanager
def open_journal(
    folder: Path, segment_bytes: int = SEGMENT_BYTES, *, keep_answers: bool = False
) -> Generator[DiskJournal]:
    """The journal in a folder, which is made if need be; one process at a time.

    Args:
        folder: of the journal.
        segment_bytes: size of a segment.
        keep_answers: keep the answers to puts of sessions that a process before has served; they
            are deleted otherwise.

    Raises:
        ConfigError: the folder is on a network file system, or another process uses its journal.
        OutputError: the folder or its files can't be made or read.
    """
    try:
        payload = folder / SEGMENTS
        payload.mkdir(parents=True, exist_ok=True)
        _sync_names_above(folder)
        _check_file_system(folder)
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise OutputError(
            f"TransferQueueConfig.journal_dir={folder} can't be used: {error.strerror or error}."
        ) from error
    try:
        if not _locked(lock):
            raise _in_use(folder)
        try:
            metadata = Metadata(sqlite3.connect(folder / METADATA, isolation_level=None))
            if not keep_answers:
                metadata.forget_answers()
            fsync(folder)
        except (OSError, sqlite3.Error) as error:
            raise OutputError(f"The journal in {folder} can't be opened: {error}.") from error
        journal = DiskJournal(metadata, DiskFiles(payload), str(folder), segment_bytes)
        try:
            yield journal
        finally:
            journal.close()
            fcntl.flock(lock, fcntl.LOCK_UN)  # a forked process would keep it with its file descriptor
    finally:
        os.close(lock)


def check_journal(folder: Path, *, wait_s: float = 0.0) -> None:
    """Check what `open_journal` would refuse, and that there is room for the first segments,
    without changing anything.

    Args:
        folder: of the journal.
        wait_s: how long to wait for another process that uses it.

    Raises:
        ConfigError: as `open_journal`, or there is no room, or something else has the folder's
            name.
    """
    there = _check_unused(folder, wait_s)
    need, free = 2 * SEGMENT_BYTES, shutil.disk_usage(there).free
    if free < need:
        raise ConfigError(
            f"TransferQueueConfig.journal_dir={folder} needs {need} bytes for its first segments, and {free} are free. Free space there, or "
            "set a folder on a larger disk."
        )


def _check_unused(folder: Path, wait_s: float) -> Path:
    """Check that the folder can have a journal that no other process uses; returns the nearest
    folder that is there."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise ConfigError(f"TransferQueueConfig.journal_dir must be a folder, got {folder}; {there} is none.")
    _check_file_system(there)
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return there
    except OSError as error:
        raise ConfigError(
            f"TransferQueueConfig.journal_dir={folder} can't be used: {error.strerror or error}."
        ) from error
    deadline = time.monotonic() + wait_s
    try:
        while not _locked(lock):
            if time.monotonic() >= deadline:
                raise _in_use(folder)
            time.sleep(_POLL_S)
    finally:
        os.close(lock)
    return there


def remove_journal(folder: Path) -> None:
    """Remove the files of a journal that no process uses, and its folder if nothing else is there.

    A removal that was cut is finished by the next one; a folder without a journal stays as it is.
    The metadata goes first, so a journal that is opened in between has no rows, and removes the
    segments itself. The lock, which marks a folder as that of a journal, goes last.

    Raises:
        ConfigError: a process uses it.
        OutputError: a file can't be removed.
    """
    _check_unused(folder, 0.0)
    try:
        if (folder / LOCK).exists():
            for path in sorted(folder.glob(f"{METADATA}*")):  # the database before its log, which is void without it
                path.unlink()
            fsync(folder)
            if (folder / SEGMENTS).exists():
                shutil.rmtree(folder / SEGMENTS)
            (folder / LOCK).unlink()
        if folder.exists() and not any(folder.iterdir()):
            folder.rmdir()
    except OSError as error:
        raise OutputError(f"The journal in {folder} can't be removed: {error}.") from error


def file_system_of(path: Path, mountinfo: str) -> str:
    """Type of the file system that holds an absolute path, by the text of /proc/self/mountinfo.

    >>> file_system_of(Path("/a/b"), "1 0 0:1 / / rw - ext4 x rw\\n2 1 0:2 / /a rw - nfs4 h:/x rw")
    'nfs4'
    """
    best, found = -1, ""
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        point = Path(left.split()[4].replace("\\040", " "))
        if path.is_relative_to(point) and len(point.parts) >= best:
            best, found = len(point.parts), right.split()[0]
    return found


def _sync_names_above(folder: Path) -> None:
    """Make the names of the folder and of those above it durable.

    A caller may have made them a moment ago, and a loss of power takes all that is below a lost
    name. Folders that this process can't change hold no names that it has made.
    """
    for above in folder.absolute().parents:
        if not os.access(above, os.R_OK | os.W_OK):
            break
        fsync(above)


def _check_file_system(folder: Path) -> None:
    if not uses_linux():
        return  # the type of a file system is not known
    found = file_system_of(folder.resolve(), Path("/proc/self/mountinfo").read_text())
    if found in NETWORK_FILE_SYSTEMS:
        raise ConfigError(
            f"TransferQueueConfig.journal_dir must be on a local disk, got {folder} on {found}: SQLite's write-ahead log does not work there."
        )


def _locked(handle: int) -> bool:
    """Take the lock of a journal, if no other process has it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _in_use(folder: Path) -> ConfigError:
    return ConfigError(
        f"TransferQueueConfig.journal_dir={folder} is in use by another process; set another folder for each plane."
    )
