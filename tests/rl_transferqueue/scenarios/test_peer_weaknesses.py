"""Weaknesses observed in TransferQueue 0.1.11, and tests that this package does not have them.

- A consumer that waits for missing data stops all others for 5.8 s:
  `test_a_waiting_consumer_blocks_no_other`
- n single inserts cost n^2:
  `test_the_cost_of_an_insert_does_not_grow`
- A put that the controller refuses succeeds for its caller:
  `test_a_refused_put_raises_and_stores_nothing`
- An ended storage unit is noticed after minutes, and its keys are still listed:
  `test_a_dead_storage_unit_is_a_typed_error_within_seconds`
- An ended controller makes its clients hang forever:
  `test_a_dead_controller_is_a_typed_error_within_seconds`
- Dense rows come back nested:
  `test_dense_rows_come_back_dense`
- One remaining row keeps the memory of its whole batch:
  `test_one_live_row_does_not_pin_its_batch`
- The controller runs a pickle from an unknown peer:
  `test_a_pickle_from_an_unknown_peer_is_not_run`
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

from rl_protocol import (
    BatchData,
    CapacityTimeout,
    DataPlaneError,
    DenseColumn,
    DuplicateKeyError,
    KVBatchMeta,
    PlaneLostError,
    dense,
)
from rl_protocol.batch.dtypes import STORAGE_DTYPES
from rl_protocol.torch import to_tensordict
from rl_transferqueue import Client, LocalPlane, TransferQueueConfig, connect, start_local_plane
from rl_transferqueue.transport.unix_link import SCHEME

MIB = 1 << 20


def rows(count: int, nbytes: int) -> BatchData:
    return BatchData({"x": dense(np.ones((count, nbytes // count), np.uint8))})


def names(count: int) -> list[str]:
    return [f"k{i}" for i in range(count)]


def test_a_waiting_consumer_blocks_no_other(plane: LocalPlane) -> None:
    async def main() -> None:
        async with await connect(plane.descriptor) as consumer, await connect(plane.descriptor) as other:
            waiting = [
                asyncio.ensure_future(consumer.wait_ready("never", count=1, fields=[f"f{i}"], task="t", timeout_s=60))
                for i in range(20)
            ]
            await asyncio.sleep(0.05)
            slowest = 0.0
            for i in range(100):
                began = time.monotonic()
                await other.put("p", ["a"], tags=[{"n": i}])
                slowest = max(slowest, time.monotonic() - began)
            assert slowest < 30
            assert not any(task.done() for task in waiting)
            for task in waiting:
                task.cancel()

    asyncio.run(main())


@pytest.mark.nightly
def test_the_cost_of_an_insert_does_not_grow() -> None:
    """4 times as many inserts take the controller about 4 times as much CPU time, not 16 times."""
    data = BatchData({f"f{i}": dense(np.ones(1, np.float32)) for i in range(8)})

    async def cpu_seconds(plane: LocalPlane, count: int) -> float:
        controller = psutil.Process(plane.pids[0])
        async with await connect(plane.descriptor) as client:
            before = sum(controller.cpu_times()[:2])
            for start in range(0, count, 64):
                await asyncio.gather(*(client.put("p", [f"k{i}"], data) for i in range(start, start + 64)))
            return sum(controller.cpu_times()[:2]) - before

    seconds: list[float] = []
    for count in (8192, 32768):
        with start_local_plane(TransferQueueConfig(capacity_mb=128, segment_mb=8)) as plane:
            seconds.append(asyncio.run(cpu_seconds(plane, count)))
    assert seconds[1] / seconds[0] < 8, seconds


def test_a_refused_put_raises_and_stores_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(plane: LocalPlane) -> None:
        async with await connect(plane.descriptor) as client:
            await client.put("p", ["a"], rows(1, MIB))
            used = (await client.stats()).bytes_used
            with pytest.raises(CapacityTimeout):
                await client.put("p", ["b"], rows(1, 3 * MIB // 2), timeout_s=0.05)
            monkeypatch.setattr("rl_transferqueue.client.client._check_put", lambda *_: None, raising=False)
            with pytest.raises(DuplicateKeyError):  # raised by the controller
                await client.put("p", ["c", "c"], rows(2, 4096))
            assert (await client.list_rows("p")).keys == ("a",)
            assert (await client.stats()).bytes_used == used

    with start_local_plane(TransferQueueConfig(num_storage_units=1, capacity_mb=2, segment_mb=1)) as plane:
        asyncio.run(main(plane))


async def _raises_soon(what: Awaitable[object], kind: type[DataPlaneError]) -> None:
    began = time.monotonic()
    with pytest.raises(kind):
        await what
    assert time.monotonic() - began < 60


def test_a_dead_storage_unit_is_a_typed_error_within_seconds() -> None:
    async def until_it_raises(client: Client, meta: KVBatchMeta) -> None:
        # Until the client notices, it may still read mapped memory, which is correct.
        while True:
            assert (await client.get(meta, timeout_s=60)).dense("x").values.all()
            await asyncio.sleep(0.01)

    async def put_until_it_raises(client: Client) -> None:
        # Rows that are accepted before the controller notices are lost with the unit.
        for n in itertools.count():
            await client.put("p", [f"new{n}"], rows(1, MIB), timeout_s=60)
            await client.clear("p", [f"new{n}"])
            await asyncio.sleep(0.01)

    async def main(plane: LocalPlane) -> None:
        async with await connect(plane.descriptor) as client, await connect(plane.descriptor) as other:
            metas = [await client.put("p", [f"k{i}"], rows(1, MIB)) for i in range(4)]
            for pid in plane.pids[1:]:
                os.kill(pid, signal.SIGKILL)
            for one in (client, other):
                for meta in metas:
                    await _raises_soon(until_it_raises(one, meta), DataPlaneError)
                await _raises_soon(put_until_it_raises(one), DataPlaneError)

    with start_local_plane(TransferQueueConfig(capacity_mb=32, segment_mb=1)) as plane:
        asyncio.run(main(plane))


def test_a_dead_controller_is_a_typed_error_within_seconds() -> None:
    async def main(plane: LocalPlane) -> None:
        async with await connect(plane.descriptor) as client, await connect(plane.descriptor) as other:
            meta = await client.put("p", ["a"], rows(1, MIB))
            waiting = asyncio.ensure_future(other.wait_ready("p", count=2, timeout_s=600))
            await asyncio.sleep(0.05)
            os.kill(plane.pids[0], signal.SIGKILL)
            await _raises_soon(waiting, PlaneLostError)
            calls: list[Callable[[Client], Awaitable[object]]] = [
                lambda c: c.list_rows("p"),
                lambda c: c.put("p", ["b"], tags=[{"n": 1}]),
                lambda c: c.put("p", ["b"], rows(1, MIB)),
                lambda c: c.get(meta),
                lambda c: c.clear("p"),
                lambda c: c.stats(),
                lambda c: c.wait_ready("p", count=1, timeout_s=600),
            ]
            for call in calls:
                for one in (client, other):
                    await _raises_soon(call(one), PlaneLostError)

    with start_local_plane(TransferQueueConfig(capacity_mb=8, segment_mb=1)) as plane:
        asyncio.run(main(plane))


def test_dense_rows_come_back_dense(plane: LocalPlane) -> None:
    """Rows of separate puts keep their shape and bits for every element type, also as tensors."""

    async def main() -> None:
        columns = {
            name: DenseColumn(np.arange(8).reshape(2, 4).astype("int8").astype(store), name)
            for name, store in STORAGE_DTYPES.items()
        }
        batch = BatchData(columns)
        async with await connect(plane.descriptor) as client:
            await client.put("p", ["a"], batch.slice(0, 1))
            await client.put("p", ["b"], batch.slice(1, 2))
            got = await client.get(await client.list_rows("p"))
            tensors = to_tensordict(got)
            for name in columns:
                assert got.dense(name).values.tobytes() == columns[name].values.tobytes()
                assert (tuple(tensors[name].shape), tensors[name].is_nested) == ((2, 4), False)

    asyncio.run(main())


def test_one_live_row_does_not_pin_its_batch(plane: LocalPlane) -> None:
    """Clearing 63 of 64 rows frees at least 90 % of their bytes; the other row is unchanged."""

    async def main() -> None:
        async with await connect(plane.descriptor) as client:
            values = np.arange(64 * 16384, dtype=np.int64).reshape(64, 16384)
            meta = await client.put("p", names(64), BatchData({"x": dense(values)}))
            full = (await client.stats()).bytes_used
            await client.clear("p", [key for key in meta.keys if key != "k40"])
            deadline = time.monotonic() + 60
            while (used := (await client.stats()).bytes_used) > full * (1 / 64 + 0.1):
                assert time.monotonic() < deadline, f"{used} of {full} bytes are still used"
                await asyncio.sleep(0.02)
            got = await client.get(meta.select_keys(["k40"]))
            assert got.dense("x").values.tolist() == [values[40].tolist()]

    asyncio.run(main())


def test_a_pickle_from_an_unknown_peer_is_not_run(plane: LocalPlane, tmp_path: Path) -> None:
    """Both servers get the pickle as it is, as a msgpack extension, and inside a request."""
    victim = tmp_path / "ran"

    class Payload:
        def __reduce__(self) -> tuple[object, tuple[object, ...]]:
            return Path.touch, (victim,)

    raw = pickle.dumps(Payload())
    pickle.loads(raw)
    assert victim.exists(), "the payload does nothing"
    victim.unlink()
    frames = [
        raw,
        msgspec.msgpack.encode(msgspec.msgpack.Ext(1, raw)),
        msgspec.msgpack.encode([7, msgspec.msgpack.Ext(1, raw)]),
        msgspec.msgpack.encode([7, ["GetStats", msgspec.msgpack.Ext(1, raw)]]),
    ]
    for address in (plane.descriptor.controller.address, plane.descriptor.units[0].address):
        with socket.socket(socket.AF_UNIX) as stream:
            stream.settimeout(60)
            stream.connect(address.removeprefix(SCHEME))
            for frame in (b"stranger", *frames):
                stream.sendall(len(frame).to_bytes(4, "little") + frame)
            said = b""
            while said.count(b"WireError") < len(frames):
                said += stream.recv(1 << 16)

    async def main() -> None:
        async with await connect(plane.descriptor) as client:
            await client.stats()

    asyncio.run(main())
    assert not victim.exists()
