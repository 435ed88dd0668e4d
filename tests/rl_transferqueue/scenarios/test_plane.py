"""A real plane: shared memory, several clients and processes, and flow control."""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from polling import until_async

from rl_protocol import (
    BatchData,
    BatchError,
    CapacityTimeout,
    ColumnSpec,
    KVBatchMeta,
    MissingDataError,
    PlaneTimeout,
    dense,
    ragged,
)
from rl_protocol.errors import PlaneLostError
from rl_transferqueue import Client, LocalPlane, PlaneDescriptor, TransferQueueConfig, connect, start_local_plane
from rl_transferqueue.memory.arena import map_arena

MIB = 1 << 20


@asynccontextmanager
async def two_clients(descriptor: PlaneDescriptor) -> AsyncIterator[tuple[Client, Client]]:
    async with await connect(descriptor) as one, await connect(descriptor) as two:
        yield one, two


def rows_of(value: int, rows: int, nbytes: int) -> BatchData:
    return BatchData({"x": dense(np.full((rows, nbytes // rows), value, np.uint8))})


def names(rows: int, prefix: str = "k") -> list[str]:
    return [f"{prefix}{i}" for i in range(rows)]


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def arena_of(descriptor: PlaneDescriptor, array: np.ndarray) -> bool:
    """Return whether the array lies in the arena of a storage unit."""
    for unit in descriptor.units:
        base = address(np.frombuffer(map_arena(unit, writable=False), np.uint8))
        if base <= address(array) < base + unit.arena_bytes:
            return True
    return False


# --------------------------------------------------------------------------------
# Event loops
@pytest.mark.parametrize("stopped", [True, False], ids=["stopped loop", "running loop"])
def test_a_client_of_another_event_loop_says_so_in_every_call(plane: LocalPlane, stopped: bool) -> None:
    calls: list[Callable[[Client], Awaitable[object]]] = [
        lambda client: client.list_rows("p"),
        lambda client: client.put("p", ["a"], tags=[{}]),
        lambda client: client.wait_ready("p", count=1, timeout_s=60),
        lambda client: client.get(KVBatchMeta(partition="p", keys=("a",)), []),
        lambda client: client.close(),
    ]

    async def use(client: Client) -> None:
        for call in calls:
            with pytest.raises(PlaneLostError, match="belongs to the event loop that ran when it connected"):
                await call(client)

    with asyncio.Runner() as runner:
        client = runner.run(connect(plane.descriptor))
        if stopped:
            asyncio.run(use(client))
        else:
            runner.run(asyncio.to_thread(asyncio.run, use(client)))
        assert runner.run(client.list_rows("p")).keys == ()
        runner.run(client.close())


# --------------------------------------------------------------------------------
# Zero copy
def test_rows_of_one_block_are_views_of_shared_memory(plane: LocalPlane) -> None:
    async def main() -> None:
        async with await connect(plane.descriptor) as client:
            data = BatchData(
                {
                    "d": dense(np.arange(4000.0).reshape(8, 500)),
                    "r": ragged([[1, 2], [], [3]] * 2 + [[4], [5]], "int32"),
                }
            )
            meta = await client.put("p", names(8), data)
            whole, again = await client.get(meta), await client.get(meta)
            part = await client.get(meta.slice(2, 6))
            scattered = await client.get(meta.select_rows([6, 1]))
            values = whole.dense("d").values
            assert arena_of(plane.descriptor, values)
            assert address(values) == address(again.dense("d").values)
            assert address(part.dense("d").values) == address(values) + 2 * 500 * 8
            assert arena_of(plane.descriptor, part.ragged("r").values)
            assert not arena_of(plane.descriptor, scattered.dense("d").values)
            assert scattered.dense("d").values.tolist() == values[[6, 1]].tolist()
            with pytest.raises(ValueError, match="read-only"):
                values[0] = 1

    asyncio.run(main())


def test_the_memory_of_a_view_is_not_used_again_before_it_is_gone() -> None:
    """The plane has room for two batches, so a reader that keeps one leaves room for one."""
    config = TransferQueueConfig(num_storage_units=1, capacity_mb=2, segment_mb=1)

    async def main(plane: LocalPlane) -> None:
        async with two_clients(plane.descriptor) as (writer, reader):
            meta = await writer.put("p", names(4), rows_of(1, 4, MIB))
            view = (await reader.get(meta)).dense("x").values[1:3, :7]
            await writer.clear("p")
            assert (await writer.stats()).bytes_used == MIB
            for value in range(2, 12):
                await writer.put("q", names(4), rows_of(value, 4, MIB // 2))
                assert (view == 1).all()
            with pytest.raises(CapacityTimeout, match=r"not enough became free within 0\.05 s\."):
                await writer.put("r", names(4), rows_of(9, 4, MIB + 64), timeout_s=0.05)
            await writer.clear("q")
            assert (await writer.stats()).bytes_used == MIB
            waiting = asyncio.ensure_future(writer.put("r", names(4), rows_of(9, 4, MIB + 64), timeout_s=60))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            assert (view == 1).all()
            del view
            await waiting
            assert (await writer.stats()).bytes_used == MIB + 64

    with start_local_plane(config) as plane:
        asyncio.run(main(plane))


def test_a_stale_reader_gets_an_error_never_other_data(plane: LocalPlane) -> None:
    async def main() -> None:
        async with two_clients(plane.descriptor) as (writer, reader):
            stale = await writer.put("p", names(3), rows_of(1, 3, 3000))
            await reader.get(stale)
            await writer.clear("p", ["k1"])
            await writer.put("q", names(3), rows_of(2, 3, 3000))
            with pytest.raises(MissingDataError, match="k1"):
                await reader.get(stale)
            await writer.put("p", ["k1"], BatchData({"y": dense([1.0])}))
            with pytest.raises(MissingDataError, match="k1"):
                await reader.get(stale)
            assert (await reader.get(stale.select_rows([0, 2]))).dense("x").values.max() == 1

    asyncio.run(main())


@pytest.mark.parametrize("shared_memory", [True, False], ids=["here", "tcp"])
def test_drafts_that_are_dropped_leave_no_memory_reserved(shared_memory: bool) -> None:
    """The plane has room for one draft at a time."""
    listen = {} if shared_memory else {"listen": "127.0.0.1", "shared_memory": False}
    config = TransferQueueConfig(num_storage_units=1, capacity_mb=2, segment_mb=1, **listen)
    columns = [ColumnSpec(name="x", kind="dense", dtype="uint8", dims=(MIB + 64,))]

    async def main(plane: LocalPlane) -> None:
        async with await connect(plane.descriptor) as client:
            for _ in range(3):
                draft = await client.alloc(columns, 1, timeout_s=10)
                draft["x"][:] = 1
                del draft

    with start_local_plane(config) as plane:
        asyncio.run(main(plane))


def test_a_descriptor_that_was_read_has_the_text_that_was_written() -> None:
    with start_local_plane(TransferQueueConfig(capacity_mb=2, timeout_s=240)) as plane:
        text = plane.descriptor.to_json()
    assert PlaneDescriptor.from_json(text).to_json() == text


def test_views_survive_their_client_and_the_plane() -> None:
    async def main(plane: LocalPlane) -> np.ndarray:
        async with await connect(plane.descriptor) as client:
            meta = await client.put("p", names(2), rows_of(7, 2, 8192))
            return (await client.get(meta)).dense("x").values

    with start_local_plane(TransferQueueConfig(capacity_mb=2)) as plane:
        values = asyncio.run(main(plane))
        assert (values == 7).all()
    assert (values == 7).all()


# --------------------------------------------------------------------------------
# Flow control
def test_a_full_plane_makes_puts_wait_and_says_what_is_missing() -> None:
    config = TransferQueueConfig(num_storage_units=2, capacity_mb=4, segment_mb=1)

    async def main(plane: LocalPlane) -> None:
        async with two_clients(plane.descriptor) as (one, two):
            for i in range(2):
                await one.put("p", [f"a{i}", f"b{i}"], rows_of(i, 2, 2 * MIB))
            began = time.monotonic()
            with pytest.raises(
                CapacityTimeout, match=r"65536 bytes.* 0 of 4194304 bytes.*TransferQueueConfig\.capacity_mb"
            ):
                await two.put("p", ["c"], rows_of(3, 1, 65536), timeout_s=0.2)
            assert time.monotonic() - began > 0.15
            assert (await two.list_rows("p")).keys == ("a0", "b0", "a1", "b1")
            waiting = [
                asyncio.ensure_future(two.put("p", [f"w{i}"], rows_of(i, 1, 65536), timeout_s=60)) for i in range(3)
            ]
            gone = asyncio.ensure_future(two.put("p", ["gone"], rows_of(9, 1, 65536), timeout_s=60))
            await asyncio.sleep(0.05)
            gone.cancel()
            assert await asyncio.wait(waiting, timeout=0.05) == (set(), set(waiting))
            await one.clear("p", ["a0", "b0"])
            metas = [await task for task in waiting]
            assert [(await one.get(m)).dense("x").values[0, 0] for m in metas] == [0, 1, 2]
            assert (await one.stats()).bytes_used == 2 * MIB + 3 * 65536

    with start_local_plane(config) as plane:
        asyncio.run(main(plane))


def test_a_batch_no_unit_could_hold_is_refused_at_once(plane: LocalPlane) -> None:
    async def main() -> None:
        async with await connect(plane.descriptor) as client:
            with pytest.raises(BatchError, match=r"TransferQueueConfig\.capacity_mb"):
                await client.put("p", ["a"], rows_of(1, 1, 17 * MIB))

    asyncio.run(main())


def test_memory_comes_back(plane: LocalPlane) -> None:
    async def main() -> None:
        async with two_clients(plane.descriptor) as (one, two):
            for i in range(50):
                meta = await one.put("p", names(16), rows_of(i, 16, 2 * MIB))
                values = (await two.get(meta if i % 2 else meta.select_rows([9, 0, 5]))).dense("x").values
                assert (values == i).all()
                await one.clear("p", None if i % 3 else names(16))
            del values
            assert (await two.stats()).bytes_used == 0

    asyncio.run(main())


def test_a_partial_clear_gives_memory_back_and_keeps_the_rest(plane: LocalPlane) -> None:
    async def main() -> None:
        async with await connect(plane.descriptor) as client:
            data = BatchData(
                {
                    "d": dense(np.arange(64 * 1024).reshape(64, 1024)),
                    "r": ragged([np.arange(i) for i in range(64)], "int64"),
                }
            )
            meta = await client.put("p", names(64), data)
            await client.put("p", names(8), BatchData({"r": ragged([[i] for i in range(8)], "int64")}))
            full = (await client.stats()).bytes_used
            view = (await client.get(meta.slice(0, 1))).dense("d").values
            assert await client.clear("p", [k for i, k in enumerate(meta.keys) if i % 8]) == 56

            async def used(condition: Callable[[int], bool]) -> bool:
                return condition((await client.stats()).bytes_used)

            await until_async(lambda: used(lambda nbytes: nbytes > full), "the view holds its block beside the copy")
            assert (view == np.arange(1024)).all()
            del view
            await until_async(lambda: used(lambda nbytes: nbytes <= full / 8 + 4096), "the large block is given back")
            left = meta.select_rows(range(0, 64, 8))
            got = await client.get(left)
            assert got.dense("d").values.tolist() == data.select_rows(range(0, 64, 8)).dense("d").values.tolist()
            assert got.ragged("r").lengths.tolist() == [1, 8, 16, 24, 32, 40, 48, 56]

    asyncio.run(main())


# --------------------------------------------------------------------------------
# Cancellation
def test_cancelled_puts_and_gets_leave_nothing_behind(plane: LocalPlane) -> None:
    async def main() -> None:
        async with two_clients(plane.descriptor) as (client, other):
            meta = await client.put("p", names(4), rows_of(1, 4, 4096))
            for delay in np.linspace(0, 0.004, 25):
                tasks = [
                    asyncio.ensure_future(client.put("q", names(4), rows_of(2, 4, 2 * MIB))),
                    asyncio.ensure_future(client.get(meta)),
                    asyncio.ensure_future(client.wait_ready("p", count=4, task="t", timeout_s=60)),
                ]
                await asyncio.sleep(float(delay))
                for task in tasks:
                    task.cancel()
                done = await asyncio.gather(*tasks, return_exceptions=True)
                if not isinstance(done[2], BaseException):
                    await client.clear("p")
                    meta = await client.put("p", names(4), rows_of(1, 4, 4096))
                del done, tasks
            assert len(await other.wait_ready("p", count=4, task="t", timeout_s=60)) == 4
            await client.clear("q")
            gc.collect()

            async def only_p() -> bool:
                return (await client.stats()).bytes_used == 4096

            await until_async(only_p, "the memory of cancelled calls comes back")

    asyncio.run(main())


def test_a_call_after_close_is_refused(plane: LocalPlane) -> None:
    async def main() -> None:
        client = await connect(plane.descriptor)
        await client.close()
        with pytest.raises(PlaneLostError, match="closed"):
            await client.stats()

    asyncio.run(main())


def test_what_cannot_be_said_is_refused_and_costs_no_memory(plane: LocalPlane) -> None:
    async def main() -> None:
        async with await connect(plane.descriptor) as client:
            for tag in ({"n": 1 << 70}, {"n": object()}, {"n": [1]}):
                with pytest.raises(BatchError):
                    await client.put("p", ["a"], rows_of(1, 1, 64), tags=[tag])  # type: ignore[list-item]
            with pytest.raises(BatchError):
                await client.put("p", ["\ud800"], rows_of(1, 1, 64))
            assert (await client.stats()).bytes_used == 0

    asyncio.run(main())


# --------------------------------------------------------------------------------
# Other processes
PRODUCER = """
import asyncio, sys
import numpy as np
from rl_protocol import BatchData, dense, ragged
from rl_transferqueue import PlaneDescriptor, connect

async def main(descriptor, first):
    async with await connect(PlaneDescriptor.from_json(descriptor)) as client:
        for i in range(first, first + 40, 4):
            rows = range(i, i + 4)
            await client.put("p", [f"k{r}" for r in rows], BatchData({"x": dense(np.arange(i, i + 4))}), tags=[{"r": r} for r in rows])
            await client.put("p", [f"k{r}" for r in rows], BatchData({"y": ragged([[r] * (r % 5) for r in rows], "int32")}))

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


def test_producers_in_other_processes_and_two_consumers(plane: LocalPlane) -> None:
    async def consume(client: Client, seen: list[int]) -> None:
        for _ in range(10):
            meta = await client.wait_ready("p", count=4, fields=["x", "y"], task="train", timeout_s=60)
            got = await client.get(meta, ["x", "y"])
            rows = got.dense("x").values.tolist()
            assert rows == [tag["r"] for tag in meta.tags]
            assert [row.tolist() for row in got.ragged("y").rows()] == [[r] * (r % 5) for r in rows]
            await client.clear("p", meta.keys)
            seen.extend(rows)

    async def main() -> list[int]:
        seen: list[int] = []
        async with two_clients(plane.descriptor) as (one, two):
            await asyncio.gather(consume(one, seen), consume(two, seen))
        return seen

    command = [sys.executable, "-c", PRODUCER, plane.descriptor.to_json()]
    with subprocess.Popen([*command, "0"]) as first, subprocess.Popen([*command, "40"]) as second:
        assert sorted(asyncio.run(main())) == list(range(80))
    assert (first.returncode, second.returncode) == (0, 0)


def test_a_waiting_client_delays_no_other(plane: LocalPlane) -> None:
    async def main() -> None:
        async with two_clients(plane.descriptor) as (waiter, other):
            waiting = asyncio.ensure_future(waiter.wait_ready("never", count=1, timeout_s=600))
            for _ in range(50):
                await other.put("p", ["a"], tags=[{"n": 1}])
            assert not waiting.done()
            waiting.cancel()
            with pytest.raises(PlaneTimeout, match="0 of 1"):
                await waiter.wait_ready("never", count=1, timeout_s=0.05)

    asyncio.run(main())


def test_calls_that_are_answered_at_once_let_the_loop_go_on(plane: LocalPlane) -> None:
    async def main() -> None:
        async with await connect(plane.descriptor) as client:
            turns = 0

            async def other() -> None:
                nonlocal turns
                while True:
                    await asyncio.sleep(0)
                    turns += 1

            beside = asyncio.create_task(other())
            number = 0
            while turns < 10 and number < 100_000:  # without turns this is a few seconds
                number += 1
                await client.put("turns", ["a"], tags=[{"n": number}])
            beside.cancel()
            assert turns >= 10

    asyncio.run(main())


def test_an_unused_plane_sleeps(plane: LocalPlane) -> None:
    def seconds() -> float:
        ticks = 0
        for pid in plane.pids:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    async def main() -> None:
        async with await connect(plane.descriptor) as client:
            await client.put("p", ["a"], rows_of(1, 1, 64))

            async def idle() -> bool:
                before = seconds()
                await asyncio.sleep(1.0)
                return seconds() - before <= 0.1

            await until_async(idle, "the servers, which first touch memory ahead of need, use no processor time")

    asyncio.run(main())


def test_mappings_are_shared_by_the_clients_of_a_process(plane: LocalPlane) -> None:
    unit = plane.descriptor.units[0]
    one = map_arena(unit, writable=False)
    assert isinstance(one, mmap.mmap)
    assert map_arena(unit, writable=False) is one


def test_many_rows_from_many_puts_keep_their_order(plane: LocalPlane) -> None:
    async def main() -> None:
        async with await connect(plane.descriptor) as client:
            for i in range(200):
                await client.put("p", [f"k{i}"], BatchData({"x": dense([i])}))
            order = np.random.default_rng(0).permutation(200).tolist()
            got = await client.get(KVBatchMeta(partition="p", keys=tuple(f"k{i}" for i in order)), ["x"])
            assert got.dense("x").values.tolist() == order

    asyncio.run(main())


def test_columns_without_bytes(plane: LocalPlane) -> None:
    async def main() -> None:
        async with await connect(plane.descriptor) as client:
            meta = await client.put("p", ["a", "b"], BatchData({"x": dense(np.zeros((2, 0, 3), np.float32))}))
            assert (await client.get(meta)).dense("x").values.shape == (2, 0, 3)

    asyncio.run(main())
