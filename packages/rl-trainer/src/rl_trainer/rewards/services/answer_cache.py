"""The answers of a judge so far, in an SQLite file that runs share."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from rl_protocol import ConfigError

logger = logging.getLogger(__name__)
BUSY_S = 10.0
"""Longest wait for another process that writes the file."""
_Result = TypeVar("_Result")


class AnswerCache:
    """Text by key, in a table of a file. All access is in a separate thread.

    An answer that can't be read or written is logged, and the judge is asked without the cache.

    Args:
        path: the file, which is made if it does not exist.

    Raises:
        ConfigError: the file can't be opened, or is not such a file.
    """

    def __init__(self, path: Path) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="answers")
        try:
            self._database = self._thread.submit(_opened, path).result()
        except sqlite3.Error as error:
            self._thread.shutdown()
            raise ConfigError(
                f"cache={str(path)!r} of a judge can't be used: {error}. Set another file on a local disk, or leave it out."
            ) from error

    async def get(self, key: bytes) -> str | None:
        """The answer to a request; None: there is none."""
        row = await self._ask(
            lambda database: database.execute("SELECT text FROM answers WHERE key = ?", (key,)).fetchone()
        )
        return None if row is None else str(row[0])

    async def put(self, key: bytes, text: str) -> None:
        """Keep an answer, in place of an earlier one."""
        await self._ask(lambda database: database.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, text)))

    def close(self) -> None:
        """Close the file; safe to call twice."""
        if self._database is not None:
            self._thread.submit(self._database.close).result()
            self._database = None
            self._thread.shutdown()

    async def _ask(self, call: Callable[[sqlite3.Connection], _Result]) -> _Result | None:
        database = self._database
        if database is None:
            return None
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call, database)
        except sqlite3.Error as error:
            logger.warning("the cache of a judge's answers failed: %s", error)
            return None


def _opened(path: Path) -> sqlite3.Connection | None:
    database = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
    try:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")  # no fsync per answer; the last ones may be asked again
        database.execute("CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, text TEXT NOT NULL) WITHOUT ROWID")
    except sqlite3.Error:
        database.close()
        raise
    return database
