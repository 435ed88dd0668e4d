"""Records which rows were consumed, in a file that outlives the controller's process."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rl_transferqueue.wire.arrays import Ints
from rl_transferqueue.wire.process_liveness import ProcessId

_TABLES = (
    """CREATE TABLE IF NOT EXISTS consumed(
    generation INTEGER NOT NULL, task TEXT NOT NULL, partition TEXT NOT NULL, session BLOB NOT NULL, request INTEGER NOT NULL,
    PRIMARY KEY(generation, task)) WITHOUT ROWID""",
    # requests that took rows and whose callers are not known to have the answers
    "CREATE TABLE IF NOT EXISTS unconfirmed(session BLOB NOT NULL, request INTEGER NOT NULL, PRIMARY KEY(session, request)) WITHOUT ROWID",
    # pid 0: the session has ended, and its client may live; -1: the client is on another host
    "CREATE TABLE IF NOT EXISTS sessions(session BLOB PRIMARY KEY, pid INTEGER NOT NULL, start INTEGER NOT NULL) WITHOUT ROWID",
)

_ELSEWHERE = -1
"""Instead of the pid of a process on another host."""


class Consumed(NamedTuple):
    """Rows of one partition that one task has consumed."""

    partition: str
    task: str
    generations: Ints


class ConsumedRows:
    """Rows by task, and for whom they were consumed; and the sessions of these.

    Each change is written before the controller answers, so a successor of a killed controller
    hands out no row twice. Nothing is synced: a loss of power ends the plane, and no task has
    consumed the rows of the next one.

    Args:
        file: a SQLite database, made if missing.
    """

    def __init__(self, file: Path) -> None:
        self._connection = sqlite3.connect(file, isolation_level=None)
        for statement in (
            "PRAGMA locking_mode=EXCLUSIVE",
            "PRAGMA journal_mode=WAL",
            "PRAGMA synchronous=OFF",
            *_TABLES,
        ):
            self._connection.execute(statement)

    def take(self, rows: Consumed, session: bytes, request: int) -> None:
        """The rows were consumed for a request."""
        values = [(it, rows.task, rows.partition, session, request) for it in rows.generations.tolist()]
        with self._transaction():
            self._connection.executemany("INSERT OR REPLACE INTO consumed VALUES(?,?,?,?,?)", values)
            self._connection.execute("INSERT OR IGNORE INTO unconfirmed VALUES(?,?)", (session, request))

    def confirm(self, session: bytes, requests: Iterable[int]) -> None:
        """The callers of these requests have their rows, or have left without them."""
        with self._transaction():
            values = [(session, request) for request in requests]
            self._connection.executemany("DELETE FROM unconfirmed WHERE session=? AND request=?", values)

    def give_back(self, rows: Consumed) -> None:
        """The rows are not consumed by the task any more."""
        with self._transaction():
            values = [(it, rows.task) for it in rows.generations.tolist()]
            self._connection.executemany("DELETE FROM consumed WHERE generation=? AND task=?", values)

    def forget(self, generations: Iterable[int]) -> None:
        """The rows were cleared, or are consumed by no task any more."""
        with self._transaction():
            self._connection.executemany("DELETE FROM consumed WHERE generation=?", [(it,) for it in generations])

    def open_session(self, session: bytes, process: ProcessId | None) -> None:
        """A session began, or continues; `process` is None for a client on another host."""
        pid, start = (process.pid, process.start) if process is not None else (_ELSEWHERE, 0)
        with self._transaction():
            self._connection.execute("INSERT OR REPLACE INTO sessions VALUES(?,?,?)", (session, pid, start))

    def end_session(self, session: bytes, *, gone: bool) -> None:
        """A session ended; unless its client is `gone`, it may try to continue."""
        with self._transaction():
            self._connection.execute("DELETE FROM unconfirmed WHERE session=?", (session,))
            if gone:
                self._connection.execute("DELETE FROM sessions WHERE session=?", (session,))
            else:
                self._connection.execute("UPDATE sessions SET pid=0 WHERE session=?", (session,))

    def has_ended(self, session: bytes) -> bool:
        """Whether the session ended while its client lived."""
        return bool(self._connection.execute("SELECT 1 FROM sessions WHERE session=? AND pid=0", (session,)).fetchall())

    def unconfirmed(self, session: bytes) -> list[int]:
        """Requests of a session that took rows and were not confirmed."""
        query = "SELECT request FROM unconfirmed WHERE session=?"
        return [request for (request,) in self._connection.execute(query, (session,)).fetchall()]

    def awaited(self) -> dict[bytes, ProcessId | None]:
        """The client's process of each session with rows on their way; None: it is on another
        host."""
        query = "SELECT session, pid, start FROM sessions WHERE pid AND session IN (SELECT session FROM unconfirmed)"
        return {
            session: ProcessId(pid, start) if pid != _ELSEWHERE else None
            for session, pid, start in self._connection.execute(query).fetchall()
        }

    def of(self, session: bytes, request: int) -> list[Consumed]:
        """Rows that are consumed for this request."""
        return self._find("WHERE session=? AND request=?", session, request)

    def all(self) -> list[Consumed]:
        """All rows that are consumed."""
        return self._find("")

    def close(self) -> None:
        """Close the database."""
        self._connection.close()

    def _find(self, where: str, *values: bytes | int) -> list[Consumed]:
        query = f"SELECT partition, task, generation FROM consumed {where} ORDER BY generation"
        found: dict[tuple[str, str], list[int]] = {}
        for partition, task, generation in self._connection.execute(query, values):
            found.setdefault((partition, task), []).append(generation)
        return [Consumed(*key, np.array(its, np.int64)) for key, its in found.items()]

    @contextlib.contextmanager
    def _transaction(self) -> Generator[None]:
        self._connection.execute("BEGIN")
        yield  # an error ends the controller, and SQLite rolls back
        self._connection.execute("COMMIT")
