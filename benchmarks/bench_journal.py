"""Measure what rows that survive cost: puts into a plane with a journal, and its recovery.

    uv run benchmarks/bench_journal.py [--folder FOLDER] [--pairs 9] [--smoke]
        [--only large,small,recovery,before] [--revision REVISION]

Puts are compared with the slower of the same plane without a journal and of writes of the same
bytes to the same disk, each followed by fdatasync. Small rows are compared with SQLite alone, one
transaction per put, with `synchronous=FULL`. A plane without a journal is compared with that of an
earlier revision of this repository, by default the last one that had no journal.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from harness.earlier_revision import compare_with
from harness.pairs import Subject, Timing, paired, publish, summary, take_turns, verdict

from rl_protocol import BatchData, dense
from rl_transferqueue import TransferQueueConfig, connect, start_local_plane
from rl_transferqueue.journal.disk_journal import file_system_of
from rl_transferqueue.wire.descriptor import PlaneDescriptor

IN_FLIGHT = 8
SMALL_ROWS = 1000
"""Rows of a put."""
CALL_S = 600.0
BEFORE_THE_JOURNAL = "001b812e^"


class Puts:
    """A plane, and puts of 8 clients' worth at a time into it."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, config: TransferQueueConfig, stack: contextlib.ExitStack
    ) -> None:
        plane = stack.enter_context(start_local_plane(config))
        self.pids = [*plane.pids, os.getpid()]
        self._loop = loop
        self._client = loop.run_until_complete(connect(plane.descriptor))
        stack.callback(lambda: loop.run_until_complete(self._client.close()))
        self._numbers = itertools.count()

    def put(self, batch: BatchData, puts: int = IN_FLIGHT) -> None:
        """Put the batch so many times, 8 at a time, under new keys."""

        async def one() -> None:
            number = next(self._numbers)
            keys = [f"{number}-{row}" for row in range(len(batch))]
            await self._client.put("p", keys, batch, timeout_s=CALL_S)

        async def all_puts() -> None:
            for _ in range(puts // IN_FLIGHT):
                await asyncio.gather(*(one() for _ in range(IN_FLIGHT)))

        self._loop.run_until_complete(all_puts())

    def clear(self) -> None:
        """Remove all rows."""
        self._loop.run_until_complete(self._client.clear("p", timeout_s=CALL_S))


class Disk:
    """Writes to a new file, each followed by fdatasync."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "sequential"
        self._handle: int | None = None

    def write(self, data: memoryview, writes: int = IN_FLIGHT) -> None:
        """Append the bytes so many times."""
        self._handle = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
        for _ in range(writes):
            rest = data
            while rest.nbytes:
                rest = rest[os.write(self._handle, rest) :]
            os.fdatasync(self._handle)

    def remove(self) -> None:
        """Delete the file."""
        assert self._handle is not None
        os.close(self._handle)
        self._path.unlink()


class BareSqlite:
    """One table with the keys, tags and column of small rows."""

    def __init__(self, folder: Path) -> None:
        self._connection = sqlite3.connect(folder / "bare.sqlite", isolation_level=None)
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=FULL")
        self._connection.execute("CREATE TABLE rows(key TEXT PRIMARY KEY, status TEXT, x BLOB) WITHOUT ROWID")
        self._numbers = itertools.count()

    def put(self, puts: int) -> None:
        """One transaction per put."""
        value = bytes(64)
        for _ in range(puts):
            number = next(self._numbers)
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.executemany(
                "INSERT INTO rows VALUES(?,?,?)", [(f"{number}-{row}", "done", value) for row in range(SMALL_ROWS)]
            )
            self._connection.execute("COMMIT")

    def clear(self) -> None:
        """Remove all rows."""
        self._connection.execute("DELETE FROM rows")

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def sync_times(folder: Path, writes: int) -> dict[str, float]:
    """Milliseconds of an fdatasync after a write of 4 KiB: median and 99th percentile."""
    took: list[float] = []
    path = folder / "sync"
    handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    for _ in range(writes):
        os.write(handle, bytes(4096))
        start = time.perf_counter()
        os.fdatasync(handle)
        took.append((time.perf_counter() - start) * 1e3)
    os.close(handle)
    path.unlink()
    return {"p50_ms": statistics.median(took), "p99_ms": float(np.quantile(took, 0.99))}


@contextlib.contextmanager
def planes(folder: Path, capacity_mb: int) -> Iterator[tuple[Puts, Puts]]:
    """Two planes, with and without a journal."""
    with contextlib.ExitStack() as stack:
        loop = asyncio.new_event_loop()
        stack.callback(loop.close)
        durable = TransferQueueConfig(capacity_mb=capacity_mb, durability="commit", journal_dir=str(folder / "journal"))
        yield Puts(loop, durable, stack), Puts(loop, TransferQueueConfig(capacity_mb=capacity_mb), stack)


def large(folder: Path, mib: int, pairs: int) -> list[dict[str, Any]]:
    """8 puts of one payload at a time."""
    batch = BatchData({"x": dense(np.ones((1, mib << 18), np.float32))})
    data = memoryview(np.ones(mib << 18, np.float32)).cast("B")
    with planes(folder, 2 * (IN_FLIGHT + 2) * mib + 64) as (durable, volatile):
        disk = Disk(folder)
        subjects = [
            Subject("journal", lambda: durable.put(batch), durable.pids, durable.clear),
            Subject("plane", lambda: volatile.put(batch), volatile.pids, volatile.clear),
            Subject("disk", lambda: disk.write(data), [os.getpid()], disk.remove),
        ]
        timings = take_turns(subjects, pairs)
    return [
        verdict(
            f"put of {mib} MiB with a journal, over the slower of the plane without and write + fdatasync",
            _against_slower(timings, "journal", ("plane", "disk")),
            0.7,
            0.9,
            at_least=True,
            ratios={name: paired(timings, name, "journal") for name in ("plane", "disk")},
            figures=summary(timings, IN_FLIGHT * mib << 20),
            fdatasync=sync_times(folder, 300),
            file_system=file_system_of(folder.resolve(), Path("/proc/self/mountinfo").read_text()),
        )
    ]


def _against_slower(timings: dict[str, list[Timing]], of: str, others: tuple[str, ...]) -> float:
    """Median over the pairs of (the longest time of the others) / (time of `of`)."""
    slowest = [max(turn, key=lambda timing: timing.wall) for turn in zip(*(timings[it] for it in others), strict=True)]
    return paired({of: timings[of], "slowest": slowest}, "slowest", of)["median"]


def small(folder: Path, pairs: int, puts: int) -> list[dict[str, Any]]:
    """Puts of 1,000 small rows, 8 at a time."""
    batch = BatchData({"x": dense(np.ones((SMALL_ROWS, 16), np.float32))})
    with planes(folder, 1024) as (durable, volatile), contextlib.closing(BareSqlite(folder)) as bare:
        subjects = [
            Subject("journal", lambda: durable.put(batch, puts), durable.pids, durable.clear),
            Subject("plane", lambda: volatile.put(batch, puts), volatile.pids, volatile.clear),
            Subject("sqlite", lambda: bare.put(puts), [os.getpid()], bare.clear),
        ]
        timings = take_turns(subjects, pairs)
    rates = {name: puts * SMALL_ROWS / statistics.median(it.wall for it in took) for name, took in timings.items()}
    return [
        verdict(
            f"rows of 64 B per second with a journal, {SMALL_ROWS} per put",
            rates["journal"],
            50_000,
            100_000,
            at_least=True,
            rows_per_s={name: float(f"{rate:.4g}") for name, rate in rates.items()},
            ratios={name: paired(timings, name, "journal") for name in ("plane", "sqlite")},
            fdatasync=sync_times(folder, 300),
        )
    ]


def recovery(folder: Path, mib: int, rows: int, rounds: int) -> list[dict[str, Any]]:
    """Seconds until a plane that is started has served all rows again, without its start."""
    config = TransferQueueConfig(capacity_mb=mib * 2 + 64, durability="commit", journal_dir=str(folder / "recovery"))
    puts, width = rows // SMALL_ROWS, (mib << 18) // rows
    batch = BatchData({"x": dense(np.ones((SMALL_ROWS, width), np.float32))})
    loop = asyncio.new_event_loop()
    with contextlib.ExitStack() as stack:
        Puts(loop, config, stack).put(batch, -(-puts // IN_FLIGHT) * IN_FLIGHT)
    ready: list[float] = []
    took: list[float] = []
    for _ in range(rounds):
        start = time.perf_counter()
        with start_local_plane(config) as plane:
            ready.append(time.perf_counter() - start)
            assert plane.recovery is not None
            found = plane.recovery.rows_kept
            loop.run_until_complete(_read_all(plane.descriptor))
            took.append(time.perf_counter() - start)
        assert found >= rows, found
        start_empty = time.perf_counter()
        with start_local_plane(TransferQueueConfig(capacity_mb=config.capacity_mb)):
            empty = time.perf_counter() - start_empty
        took[-1], ready[-1] = took[-1] - empty, ready[-1] - empty
    loop.close()
    question = f"recovery of {mib} MiB and {rows} rows, and a read of all, s"
    return [
        verdict(question, statistics.median(took), 10, 5, at_least=False, rounds=rounds, s=took, s_until_ready=ready)
    ]


async def _read_all(descriptor: PlaneDescriptor) -> None:
    """Get all rows, as many at a time as were put."""
    async with await connect(descriptor) as client:
        rows = await client.list_rows("p", timeout_s=CALL_S)
        for start in range(0, len(rows), SMALL_ROWS):
            part = rows.select_rows(range(start, min(start + SMALL_ROWS, len(rows))))
            assert len(await client.get(part, ["x"], timeout_s=CALL_S)) == len(part)


def main() -> None:
    """Compare, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="on the disk to measure; default: the one for temporary files")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--smoke", action="store_true", help="one short round of few rows, nothing written")
    parser.add_argument("--only", default="large,small,recovery,before")
    parser.add_argument("--revision", default=BEFORE_THE_JOURNAL, help="that `before` compares with")
    arguments = parser.parse_args()
    smoke, pairs = arguments.smoke, 1 if arguments.smoke else arguments.pairs
    only = set(arguments.only.split(","))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        for number, mib in enumerate((1, 4) if smoke else (1, 256)):
            folder = Path(name) / str(number)
            folder.mkdir()
            rows += large(folder, mib, pairs) if "large" in only else []
        rows += small(Path(name), pairs, 8 if smoke else 64) if "small" in only else []
        rows += recovery(Path(name), *((4, 2000, 1) if smoke else (1024, 100_000, 3))) if "recovery" in only else []
    rows += compare_with("HEAD" if smoke else arguments.revision, pairs, smoke=smoke) if "before" in only else []
    if not smoke:
        publish("_".join(["journal", *sorted(only)]), rows)


if __name__ == "__main__":
    main()
