"""Planes with a journal: real processes, killed for real."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import signal
import sqlite3
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from polling import until_async

from rl_protocol import (
    BatchData,
    BatchError,
    CapacityTimeout,
    ConfigError,
    ConflictError,
    KVBatchMeta,
    MissingDataError,
    OutputError,
    dense,
    ragged,
)
from rl_protocol.errors import RLError
from rl_protocol.support.fault_points import FaultPoint, armed_for
from rl_transferqueue import Client, LocalPlane, TransferQueueConfig, connect, start_local_plane
from rl_transferqueue.journal.segment_files import DiskFiles


def config(folder: Path, durability: str = "commit", capacity_mb: int = 32) -> TransferQueueConfig:
    return TransferQueueConfig(
        capacity_mb=capacity_mb, segment_mb=1, durability=durability, journal_dir=str(folder / "journal")
    )


def kill(plane: LocalPlane) -> None:
    """End all processes of the plane at once, without a chance to write anything."""
    for pid in plane.pids:
        os.kill(pid, signal.SIGKILL)
    plane.close()


def numbers(*values: int) -> BatchData:
    return BatchData(
        {"x": dense(np.array(values)), "text": ragged([[value] * (value % 5) for value in values], "int64")}
    )


async def contents(client: Client, partition: str = "p") -> dict[str, tuple[dict[str, object], int]]:
    """Key -> (tags, x) of all rows."""
    rows = await client.list_rows(partition)
    if not rows:
        return {}
    batch = await client.get(rows, ["x", "text"])
    texts = batch.ragged("text")
    found = batch.dense("x").values.tolist()
    lengths = np.diff(texts.offsets).tolist()
    assert lengths == [value % 5 for value in found]
    return {key: (dict(tag), value) for key, tag, value in zip(rows.keys, rows.tags, found, strict=True)}


@pytest.mark.parametrize("durability", ["commit", "every_put"])
def test_acknowledged_rows_survive_the_death_of_all_processes(tmp_path: Path, durability: str) -> None:
    async def before(plane: LocalPlane) -> None:
        async with await connect(plane.descriptor) as client:
            await client.put("p", ["a", "b", "c"], numbers(1, 2, 3), tags=[{"n": 1}, {"n": 2}, {}])
            await client.put("p", ["b", "d"], numbers(20, 4), tags=[{"m": "x"}, {"n": 4}])
            await client.put("p", ["a"], tags=[{"n": 10}])
            await client.put("q", ["only"], tags=[{"t": None}])
            assert await client.clear("p", ["c"]) == 1
            await client.put("p", ["c"], numbers(30))

    async def after(plane: LocalPlane) -> None:
        async with await connect(plane.descriptor) as client:
            assert await contents(client) == {
                "a": ({"n": 10}, 1),
                "b": ({"n": 2, "m": "x"}, 20),
                "d": ({"n": 4}, 4),
                "c": ({}, 30),
            }
            assert (await client.list_rows("q")).tags == ({"t": None},)
            await client.put("p", ["e"], numbers(5))
            assert await client.clear("p") == 5
            assert await client.clear("q") == 1

    plane = start_local_plane(config(tmp_path, durability))
    asyncio.run(before(plane))
    kill(plane)
    with start_local_plane(config(tmp_path, durability)) as plane:
        assert plane.recovery is not None
        assert (plane.recovery.rows_kept, plane.recovery.rows_incomplete) == (5, 0)
        asyncio.run(after(plane))
    with start_local_plane(config(tmp_path, durability)) as plane:
        assert plane.recovery is not None
        assert plane.recovery.rows_kept == 0


def test_a_kill_during_puts_loses_only_what_was_not_acknowledged(tmp_path: Path) -> None:
    rng = random.Random(7)
    kept: dict[str, int] = {}

    async def put_until_killed(plane: LocalPlane, start: int) -> set[str]:
        """Returns keys of puts and clears without an answer."""
        unknown: set[str] = set()
        client = await connect(plane.descriptor)

        async def writer(name: str) -> None:
            for number in range(start, start + 100_000):
                key = f"{name}{number}"
                unknown.add(key)
                try:
                    await client.put("p", [key], numbers(number))
                    kept[key] = number
                    unknown.discard(key)
                    if number % 3 == 0:
                        unknown.add(key)
                        await client.clear("p", [key])
                        del kept[key]
                        unknown.discard(key)
                except RLError:
                    return

        writers = [asyncio.create_task(writer(name)) for name in "abcd"]
        wanted = len(kept) + rng.randrange(20, 120)
        deadline = time.monotonic() + 60
        while len(kept) < wanted:
            assert time.monotonic() < deadline, "the puts make no progress"
            await asyncio.sleep(0)
        for pid in rng.sample(plane.pids, len(plane.pids)):
            os.kill(pid, signal.SIGKILL)
        await asyncio.gather(*writers)
        await client.close()
        return unknown

    for number in range(4):
        plane = start_local_plane(config(tmp_path))
        unknown = asyncio.run(put_until_killed(plane, number * 1_000_000))
        plane.close()

        async def check(plane: LocalPlane, unknown: set[str]) -> None:
            async with await connect(plane.descriptor) as client:
                found = {key: value for key, (_, value) in (await contents(client)).items()}
                assert {key: value for key, value in found.items() if key not in unknown} == {
                    key: value for key, value in kept.items() if key not in unknown
                }
                kept.clear()
                kept.update(found)

        with start_local_plane(config(tmp_path)) as plane:
            asyncio.run(check(plane, unknown))


def test_puts_of_the_same_rows_are_written_in_their_order(tmp_path: Path) -> None:
    async def main(plane: LocalPlane) -> None:
        async with await connect(plane.descriptor) as client:
            await asyncio.gather(*(client.put("p", ["a"], numbers(n), tags=[{"n": n}]) for n in range(50)))
            claims = [client.put("p", ["a"], tags=[{"owner": n}], expect=[{"n": 49}]) for n in range(1)]
            fresh = [client.put("p", ["new"], numbers(n), expect=[None]) for n in range(8)]
            results = await asyncio.gather(*claims, *fresh, return_exceptions=True)
            assert [type(result) for result in results[1:]].count(ConflictError) == 7
            cleared = await asyncio.gather(client.put("p", ["z"], numbers(1)), client.clear("p"))
            assert cleared[1] == 3
            with pytest.raises(MissingDataError):
                await client.get((await client.put("p", ["w"], tags=[{}])), ["x"])

    plane = start_local_plane(config(tmp_path))
    asyncio.run(main(plane))
    kill(plane)
    with start_local_plane(config(tmp_path)) as plane:
        assert plane.recovery is not None
        assert plane.recovery.rows_kept == 1


def test_a_row_with_a_damaged_block_is_dropped_and_counted(tmp_path: Path) -> None:
    async def write(plane: LocalPlane) -> None:
        async with await connect(plane.descriptor) as client:
            for number in range(3):
                await client.put("p", [f"k{number}"], BatchData({"x": dense(np.full((1, 512), number, np.int64))}))
            await client.put("p", ["k1", "k2"], tags=[{"late": True}] * 2)

    async def read(plane: LocalPlane) -> None:
        async with await connect(plane.descriptor) as client:
            rows = await client.list_rows("p")
            assert rows.keys == ("k0", "k2")
            assert (await client.get(rows, ["x"])).dense("x").values[:, 0].tolist() == [0, 2]

    plane = start_local_plane(config(tmp_path))
    asyncio.run(write(plane))
    kill(plane)
    (first, *_) = sorted((tmp_path / "journal" / "segments").iterdir())
    data = bytearray(first.read_bytes())
    place = data.index(np.full(512, 1, np.int64).tobytes())
    data[place + 100] ^= 1
    first.write_bytes(data)
    for incomplete in (1, 0):  # what was dropped stays dropped
        with start_local_plane(config(tmp_path)) as plane:
            assert plane.recovery is not None
            assert (plane.recovery.rows_kept, plane.recovery.rows_incomplete) == (2, incomplete)
            asyncio.run(read(plane))


def test_rows_that_are_damaged_in_memory_are_read_from_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte of the second put changes after the put is durable and before it is answered."""
    armed = armed_for(FaultPoint.ROWS_IN_MEMORY, 2, tmp_path / "flipped", flips=True)
    for name, value in armed.items():
        monkeypatch.setenv(name, value)

    async def run(plane: LocalPlane) -> tuple[list[bool], int]:
        """Which rows are read as they were put, and how many blocks were found damaged."""
        rows = [np.full((1, 1000), value) for value in (1, 2, 3)]
        async with await connect(plane.descriptor) as client:
            metas = [await client.put("p", [str(i)], BatchData({"x": dense(row)})) for i, row in enumerate(rows)]
            found = [(await client.get(meta)).dense("x").values for meta in metas]
            whole = [bool((it == row).all()) for it, row in zip(found, rows, strict=True)]
            return whole, (await client.stats()).damaged

    with start_local_plane(replace(config(tmp_path / "verified"), verify=True)) as plane:
        assert asyncio.run(run(plane)) == ([True, True, True], 1)
    (tmp_path / "flipped").unlink()
    with start_local_plane(config(tmp_path / "unverified")) as plane:
        assert asyncio.run(run(plane)) == ([True, False, True], 0)


def test_a_plane_may_hold_more_rows_on_its_disk_than_fit_into_its_memory(tmp_path: Path) -> None:
    mib = 1 << 20

    async def write(plane: LocalPlane) -> None:
        async with await connect(plane.descriptor) as client:
            for number in range(4):
                batch = BatchData({"x": dense(np.full((1, mib - 64), number, np.uint8))})
                await client.put("p", [f"k{number}"], batch, tags=[{"n": number}])
            used = (await client.stats()).bytes_used
            await client.unload("p", ["k0", "k2", "unknown"])
            assert (used, (await client.stats()).bytes_used) == (4 * (mib - 64), 2 * (mib - 64))

    async def read(plane: LocalPlane) -> None:
        async with await connect(plane.descriptor) as client:
            rows = await client.list_rows("p", fields=["x"])
            assert rows.tag_values("n") == [0, 1, 2, 3]
            assert (await client.stats()).bytes_used == 0
            for number in (2, 0, 3, 1):
                found = (await client.get(rows.select_rows([number]), ["x"])).dense("x").values
                assert set(found[0].tolist()) == {number}
                del found
                await client.unload("p", [f"k{number}"])
            with pytest.raises(
                BatchError, match=rf"needs {4 * (mib - 64)} bytes .* 4 puts .* have {2 * mib}\. Read fewer"
            ):
                await client.get(rows, ["x"])
            pair = [await client.get(rows.select_rows([number]), ["x"]) for number in (0, 1)]
            waiting = asyncio.create_task(client.get(rows.select_rows([2]), ["x"]))
            with pytest.raises(BatchError, match=r"raise TransferQueueConfig\.capacity_mb"):
                await client.put("p", ["large"], BatchData({"x": dense(np.zeros((1, 2 * mib), np.uint8))}))
            assert not waiting.done(), "there is no room"
            del pair
            await client.unload("p", ["k1"])
            assert set((await waiting).dense("x").values[0].tolist()) == {2}

    with start_local_plane(config(tmp_path)) as plane:
        asyncio.run(write(plane))
    with start_local_plane(config(tmp_path, capacity_mb=2)) as plane:
        assert plane.recovery is not None
        assert plane.recovery.rows_kept == 4
        asyncio.run(read(plane))


def test_rows_leave_a_full_plane_for_others_and_are_read_again(tmp_path: Path) -> None:
    """Of 24 rows four fit: each unit of 1 MiB holds two blocks of 448 KiB."""
    size, count = 448 << 10, 24
    rng = np.random.default_rng(7)
    wanted = rng.integers(0, 256, (count, size), np.uint8)

    async def main(plane: LocalPlane) -> None:
        async with await connect(plane.descriptor) as client, await connect(plane.descriptor) as other:
            held = await client.get(await put(client, 0), ["x"])
            await asyncio.gather(*(put(other, number) for number in range(1, count)))
            rows = await other.list_rows("p", fields=["x"])
            assert len(rows) == count, "rows on the disk alone have their columns"
            for _ in range(2):
                for number in rng.permutation(count).tolist():
                    pair = rows.select_keys([f"k{number}", f"k{(number + 1) % count}"])
                    found = await (client if number % 2 else other).get(pair, ["x"])
                    assert np.array_equal(found.dense("x").values, wanted[[number, (number + 1) % count]])
            assert np.array_equal(held.dense("x").values[0], wanted[0]), "a view does not change"
            stats = await client.stats()
            assert stats.bytes_used <= 4 * size
            assert stats.evicted > count

    async def put(client: Client, number: int) -> KVBatchMeta:
        return await client.put("p", [f"k{number}"], BatchData({"x": dense(wanted[number : number + 1])}))

    with start_local_plane(config(tmp_path, capacity_mb=2)) as plane:
        asyncio.run(main(plane))
        pids = plane.pids
    with start_local_plane(config(tmp_path, capacity_mb=2)) as plane:
        assert plane.recovery is not None
        assert (plane.recovery.rows_kept, set(pids) & set(plane.pids)) == (count, set())


def test_a_read_from_the_journal_that_finds_no_memory_says_who_holds_it(tmp_path: Path) -> None:
    """Four rows fill both units, 448 KiB each, so a fifth one needs one of them to leave."""
    size = 448 << 10

    async def write(plane: LocalPlane) -> None:
        async with await connect(plane.descriptor) as client:
            for number in range(6):
                batch = BatchData({"x": dense(np.full((1, size), number, np.uint8))})
                await client.put("p", [f"k{number}"], batch)
                await client.unload("p", [f"k{number}"])

    async def read(plane: LocalPlane) -> None:
        async with await connect(plane.descriptor) as client, await connect(plane.descriptor) as other:
            rows = await client.list_rows("p", fields=["x"])
            held = [await client.get(rows.select_rows([number]), ["x"]) for number in range(4)]
            with pytest.raises(CapacityTimeout) as one:
                await client.get(rows.select_rows([4]), ["x"], timeout_s=0.3)
            text = str(one.value)
            assert f"needs {size} bytes in one piece for the next of 1 puts ({size} bytes in all)" in text
            for unit in range(2):
                part = f"storage unit {unit} holds {2 * size} of {1 << 20} bytes ({(1 << 20) - 2 * size} free, "
                assert part in text
            assert "within 0.3 s: storage unit" in text
            assert f"Held by rows: partition 'p' {4 * size} bytes." in text
            assert "TransferQueueConfig.capacity_mb" in text
            with pytest.raises(CapacityTimeout, match="for the next of 2 puts"):
                await client.get(rows.select_rows([4, 5]), ["x"], timeout_s=0.3)
            left = asyncio.create_task(client.get(rows.select_rows([4, 5]), ["x"]))
            waiting = asyncio.create_task(other.get(rows.select_rows([5]), ["x"]))
            await asyncio.sleep(0.1)
            left.cancel()
            held.pop()
            await client.unload("p", ["k3"])
            assert set((await waiting).dense("x").values[0].tolist()) == {5}
            del held, waiting
            await client.clear("p")

        async with await connect(plane.descriptor) as client:
            await until_async(lambda: empty(client), "reads that were left hold no memory")

    async def empty(client: Client) -> bool:
        return (await client.stats()).bytes_used == 0

    with start_local_plane(config(tmp_path)) as plane:
        asyncio.run(write(plane))
    with start_local_plane(config(tmp_path, capacity_mb=2)) as plane:
        asyncio.run(read(plane))


def test_rows_are_read_from_the_journal_in_parts_and_together(tmp_path: Path) -> None:
    async def write(plane: LocalPlane) -> None:
        async with await connect(plane.descriptor) as client:
            keys = [f"k{number}" for number in range(40)]
            await client.put("p", keys, numbers(*range(40)))
            await client.put("p", keys[::3], BatchData({"x": dense(np.arange(40)[::3] + 100)}))
            await client.unload("p", keys)
            await check(client, range(40), {})
            await client.unload("p", keys[:20])
            await client.put("p", keys[5:8], BatchData({"x": dense(np.array([5, 206, 7]))}))
            await client.clear("p", keys[:2])
            await check(client, range(2, 40), {6: 206})

    async def check(client: Client, rows: Sequence[int], changed: Mapping[int, int]) -> None:
        meta = await client.list_rows("p")
        wanted = {number: number + (0 if number % 3 else 100) for number in rows} | changed
        parts = [meta.select_rows(range(start, len(meta), 4)) for start in range(4)]
        found = await asyncio.gather(*(client.get(part, ["x", "text"]) for part in parts))
        for part, batch in zip(parts, found, strict=True):
            values = [wanted[int(key[1:])] for key in part.keys]
            assert batch.dense("x").values.tolist() == values
            assert np.diff(batch.ragged("text").offsets).tolist() == [int(key[1:]) % 5 for key in part.keys]

    async def read(plane: LocalPlane) -> None:
        async with await connect(plane.descriptor) as client:
            await check(client, range(2, 40), {6: 206})

    plane = start_local_plane(config(tmp_path))
    asyncio.run(write(plane))
    kill(plane)
    with start_local_plane(config(tmp_path)) as plane:
        asyncio.run(read(plane))


def test_a_row_that_is_put_again_and_again_takes_no_more_of_the_disk(tmp_path: Path) -> None:
    mib, count = 1 << 20, 40
    folder = tmp_path / "journal"

    async def write(plane: LocalPlane) -> None:
        async with await connect(plane.descriptor) as client:
            await client.put("p", ["a", "b", "c"], tags=[{"n": 0}] * 3)
            for n in range(count):
                batch = BatchData({"x": dense(np.full((1, 8 * mib), n, np.uint8))})
                await client.put("p", ["b"], batch, tags=[{"n": n}])
            for n in range(100):
                await client.put("p", ["a", "c"], tags=[{"n": n}, {"n": -n}])
            await until_async(lambda: few_segments(), "replaced puts leave the disk")

    async def few_segments() -> bool:
        return sum(path.stat().st_size for path in (folder / "segments").iterdir()) <= 4 * 64 * mib

    async def read(plane: LocalPlane) -> None:
        async with await connect(plane.descriptor) as client:
            rows = await client.list_rows("p")
            assert (rows.keys, rows.tag_values("n")) == (("a", "b", "c"), [99, count - 1, -99]), "oldest first"
            found = await client.get(rows.select_keys(["b"]), ["x"])
            assert set(found.dense("x").values[0].tolist()) == {count - 1}
            assert await client.clear("p", ["b"]) == 1
            await client.put("p", ["b"], tags=[{"n": 7}])
            assert (await client.list_rows("p")).keys == ("a", "c", "b")

    plane = start_local_plane(config(tmp_path, capacity_mb=64))
    asyncio.run(write(plane))
    kill(plane)
    with closing(sqlite3.connect(folder / "metadata.sqlite")) as metadata:
        assert metadata.execute("SELECT count(*) FROM puts").fetchone() == (2,), "the last ones"
    with start_local_plane(config(tmp_path)) as plane:
        assert plane.recovery is not None
        assert (plane.recovery.rows_kept, plane.recovery.rows_incomplete) == (3, 0)
        asyncio.run(read(plane))


def test_unload_does_nothing_without_a_journal() -> None:
    async def main(plane: LocalPlane) -> None:
        async with await connect(plane.descriptor) as client:
            rows = await client.put("p", ["a"], numbers(3))
            used = (await client.stats()).bytes_used
            await client.unload("p", ["a"])
            assert (await client.stats()).bytes_used == used > 0
            assert (await client.get(rows, ["x"])).dense("x").values.tolist() == [3]

    with start_local_plane(TransferQueueConfig(capacity_mb=32)) as plane:
        asyncio.run(main(plane))


def test_a_full_disk_fails_the_put_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = False
    create = DiskFiles.create

    def limited(self: DiskFiles, name: str, nbytes: int) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        create(self, name, nbytes)

    monkeypatch.setattr(DiskFiles, "create", limited)

    async def main(plane: LocalPlane) -> None:
        nonlocal full
        async with await connect(plane.descriptor) as client:
            await client.put("p", ["a"], numbers(1))
            full = True
            with pytest.raises(OutputError, match=r"(?s)needs \d+ bytes.* free .*TransferQueueConfig\.journal_dir"):
                await client.put("p", ["b"], BatchData({"x": dense(np.zeros((1, 65 << 20), np.uint8))}))
            assert (await client.list_rows("p")).keys == ("a",)
            full = False
            await client.put("p", ["b"], BatchData({"x": dense(np.zeros((1, 65 << 20), np.uint8))}))
            assert (await client.list_rows("p")).keys == ("a", "b")

    settings = TransferQueueConfig(
        backend="memory", capacity_mb=256, segment_mb=1, durability="commit", journal_dir=str(tmp_path / "journal")
    )
    with start_local_plane(settings) as plane:
        asyncio.run(main(plane))


def test_wrong_settings_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="journal_dir"):
        start_local_plane(TransferQueueConfig(durability="commit"))
    with pytest.raises(ConfigError, match="durability"):
        TransferQueueConfig(durability="commit", journal_dir="x", backend="ray").check("transfer_queue.")
    (tmp_path / "journal").write_text("a file")
    with pytest.raises(ConfigError, match="must be a folder"):
        start_local_plane(config(tmp_path))
    (tmp_path / "journal").unlink()
    with start_local_plane(config(tmp_path)), pytest.raises(ConfigError, match="in use by another process"):
        start_local_plane(config(tmp_path))
    with start_local_plane(TransferQueueConfig(capacity_mb=32)) as plane:
        assert plane.recovery is None
