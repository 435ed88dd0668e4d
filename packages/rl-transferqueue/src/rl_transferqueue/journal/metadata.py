"""Metadata: SQLite with a write-ahead log that is synced at each commit."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from rl_transferqueue.journal.records import Origin, PutRecord
from rl_transferqueue.journal.segments import Place

VERSION = 1
_TABLES = (
    """CREATE TABLE IF NOT EXISTS puts(
    id INTEGER PRIMARY KEY, partition TEXT NOT NULL, keys BLOB NOT NULL, generations BLOB NOT NULL,
    header BLOB NOT NULL, tags BLOB NOT NULL)""",
    """CREATE TABLE IF NOT EXISTS blocks(
    put INTEGER NOT NULL, position INTEGER NOT NULL, name TEXT NOT NULL, segment INTEGER NOT NULL,
    start INTEGER NOT NULL, nbytes INTEGER NOT NULL, digest BLOB NOT NULL, PRIMARY KEY(put, position)) WITHOUT ROWID""",
    "CREATE TABLE IF NOT EXISTS cleared(generation INTEGER PRIMARY KEY)",
    """CREATE TABLE IF NOT EXISTS answers(
    session BLOB NOT NULL, request INTEGER NOT NULL, generations BLOB NOT NULL, PRIMARY KEY(session, request)) WITHOUT ROWID""",
    "CREATE TABLE IF NOT EXISTS last(one INTEGER PRIMARY KEY CHECK(one=1), generation INTEGER NOT NULL)",
)


class Connection(Protocol):
    """What `Metadata` uses of a `sqlite3.Connection` in autocommit mode."""

    @property
    def in_transaction(self) -> bool: ...

    def execute(self, sql: str, parameters: Sequence[Any] = ..., /) -> Iterator[Any]: ...

    def executemany(self, sql: str, parameters: Iterable[Sequence[Any]], /) -> Iterator[Any]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class StoredPut:
    """A put in the metadata: its record without the columns' bytes, and where these are."""

    number: int
    record: PutRecord
    places: Mapping[str, Place]

    @property
    def nbytes(self) -> int:
        """Bytes of its columns."""
        return sum(place.nbytes for place in self.places.values())


class Metadata:
    """Tables in one database.

    Args:
        connection: the only one of the database, closed with the metadata or if it can't be used.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        with contextlib.ExitStack() as stack:
            stack.callback(connection.close)
            execute = connection.execute
            execute("PRAGMA locking_mode=EXCLUSIVE")  # the index of the log is not a file then
            execute("PRAGMA journal_mode=WAL")
            execute("PRAGMA synchronous=FULL")
            ((version,),) = execute("PRAGMA user_version")
            if version not in (0, VERSION):
                raise sqlite3.DatabaseError(f"version {version}, this program reads {VERSION}")
            for table in _TABLES:
                execute(table)
            # Written at each opening: syncs what a killed process has committed but not synced,
            # since it is read as durable.
            execute(f"PRAGMA user_version={VERSION}")
            stack.pop_all()

    def commit(
        self,
        puts: Iterable[StoredPut] = (),
        cleared: Iterable[int] = (),
        dead: Iterable[int] = (),
        forgotten: Iterable[int] = (),
        answers: Mapping[Origin, bytes] | None = None,
        old_answers: Iterable[Origin] = (),
        last: int = 0,
    ) -> None:
        """One durable transaction.

        Args:
            puts: to add or replace.
            cleared: rows to note as cleared.
            dead: numbers of puts to delete.
            forgotten: cleared rows that no put holds any more.
            answers: packed generations by origin, to add.
            old_answers: those to delete.
            last: the largest generation of all puts; 0: as before.
        """
        with self._transaction() as connection:
            for put in puts:
                its = put.record
                connection.execute(
                    "INSERT OR REPLACE INTO puts VALUES(?,?,?,?,?,?)",
                    (put.number, its.partition, _pack(its.keys), _pack(its.generations), its.header, its.tags),
                )
                connection.executemany(
                    "INSERT OR REPLACE INTO blocks VALUES(?,?,?,?,?,?,?)",
                    [
                        (put.number, position, name, at.segment, at.offset, at.nbytes, at.digest)
                        for position, (name, at) in enumerate(put.places.items())
                    ],
                )
            connection.executemany("INSERT OR IGNORE INTO cleared VALUES(?)", [(it,) for it in cleared])
            for number in dead:
                connection.execute("DELETE FROM puts WHERE id=?", (number,))
                connection.execute("DELETE FROM blocks WHERE put=?", (number,))
            connection.executemany("DELETE FROM cleared WHERE generation=?", [(it,) for it in forgotten])
            if answers:
                connection.executemany(
                    "INSERT OR REPLACE INTO answers VALUES(?,?,?)", [(*origin, it) for origin, it in answers.items()]
                )
            connection.executemany("DELETE FROM answers WHERE session=? AND request=?", old_answers)
            if last:
                connection.execute("INSERT OR REPLACE INTO last VALUES(1,?)", (last,))

    def puts(self) -> list[StoredPut]:
        """All puts, oldest first."""
        places: dict[int, dict[str, Place]] = {}
        query = "SELECT put, name, segment, start, nbytes, digest FROM blocks ORDER BY put, position"
        for number, name, *place in self._connection.execute(query):
            places.setdefault(number, {})[name] = Place(*place)
        return [
            StoredPut(number, _record(partition, keys, generations, header, tags), places.get(number, {}))
            for number, partition, keys, generations, header, tags in self._connection.execute(
                "SELECT id, partition, keys, generations, header, tags FROM puts ORDER BY id"
            )
        ]

    def cleared(self) -> set[int]:
        """Cleared rows of puts that hold others too."""
        return {generation for (generation,) in self._connection.execute("SELECT generation FROM cleared")}

    def answers(self) -> dict[Origin, bytes]:
        """All answers, by session and request."""
        rows = self._connection.execute("SELECT session, request, generations FROM answers ORDER BY session, request")
        return {Origin(session, request): generations for session, request, generations in rows}

    def forget_answers(self) -> None:
        """Delete all answers, durable with the next commit."""
        self._connection.execute("DELETE FROM answers")

    def last_generation(self) -> int:
        """The largest generation of all puts; 0: there was none."""
        return max((generation for (generation,) in self._connection.execute("SELECT generation FROM last")), default=0)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _transaction(self) -> _Transaction:
        return _Transaction(self._connection)


class _Transaction:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __enter__(self) -> Connection:
        self._connection.execute("BEGIN IMMEDIATE")
        return self._connection

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._connection.execute("COMMIT")
        elif self._connection.in_transaction:
            self._connection.execute("ROLLBACK")


def _pack(values: tuple[str, ...] | tuple[int, ...]) -> bytes:
    return msgspec.msgpack.encode(values)


def _record(partition: str, keys: bytes, generations: bytes, header: bytes, tags: bytes) -> PutRecord:
    return PutRecord(
        partition=partition,
        keys=msgspec.msgpack.decode(keys, type=tuple[str, ...]),
        generations=msgspec.msgpack.decode(generations, type=tuple[int, ...]),
        header=header,
        tags=tags,
    )
