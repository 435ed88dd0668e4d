"""What was seen to go wrong in TransferQueue 0.1.11, the package that the peers of this one stand on, shown not to go wrong here.

there                                                                    here
a consumer that waits for missing data stops all others for 5.8 s        test_a_waiting_consumer_stops_nobody
n one-by-one inserts cost n^2                                            test_the_cost_of_an_insert_does_not_grow
a put that the controller refuses succeeds for its caller                test_a_refused_put_raises_and_stores_nothing
a dead storage unit is noticed after minutes, its keys still listed      test_a_dead_storage_unit_is_a_typed_error_within_seconds
a dead controller hangs its clients for ever                             test_a_dead_controller_is_a_typed_error_within_seconds
dense rows come back nested                                              test_dense_rows_come_back_dense
one live row pins the whole frame it came in                             test_one_live_row_does_not_pin_its_batch
a pickle from a peer nobody knows runs in the controller                 test_a_pickle_from_an_unknown_peer_is_not_run
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
from rl_protocol.dtypes import STORAGE_DTYPES
from rl_protocol.torch import to_tensordict
from rl_transferqueue import Client, LocalPlane, TransferQueueConfig, connect, start_local_plane
from rl_transferqueue.links import SCHEME

MIB = 1 << 20


def rows(count: int, nbytes: int) -> BatchData:
    return BatchData({"x": dense(np.ones((count, nbytes // count), np.uint8))})


def names(count: int) -> list[str]:
    return [f"k{i}" for i in range(count)]


def test_a_waiting_consumer_stops_nobody(plane: LocalPlane) -> None:
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
            assert slowest < 1
            assert not any(task.done() for task in waiting)
            for task in waiting:
                task.cancel()

    asyncio.run(main())


@pytest.mark.slow
def test_the_cost_of_an_insert_does_not_grow() -> None:
    """CPU seconds of the controller for 8,192 and for 32,768 inserts of 8 columns, one by one: 4 times as much, not 16 times."""
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
            monkeypatch.setattr("rl_transferqueue.client._check_put", lambda *_: None, raising=False)
            with pytest.raises(DuplicateKeyError):  # now it is the controller that refuses
                await client.put("p", ["c", "c"], rows(2, 4096))
            assert (await client.list_rows("p")).keys == ("a",)
            assert (await client.stats()).bytes_used == used

    with start_local_plane(TransferQueueConfig(num_storage_units=1, capacity_mb=2, segment_mb=1)) as plane:
        asyncio.run(main(plane))


async def _raises_soon(what: Awaitable[object], kind: type[DataPlaneError]) -> None:
    began = time.monotonic()
    with pytest.raises(kind):
        await what
    assert time.monotonic() - began < 5


def test_a_dead_storage_unit_is_a_typed_error_within_seconds() -> None:
    async def until_it_raises(client: Client, meta: KVBatchMeta) -> None:
        while True:  # until the death is known, memory that is mapped already may be read: it is right
            assert (await client.get(meta, timeout_s=60)).dense("x").values.all()
            await asyncio.sleep(0.01)

    async def put_until_it_raises(client: Client) -> None:
        for (
            n
        ) in itertools.count():  # what is accepted before the controller knows is lost with the unit, as any row of it
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
    """Whatever the element type, and however the rows were put: dense, of their shape, bit-equal; as tensors too."""

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
    """Clearing 63 of 64 rows gives at least 90 % of their bytes back; the row that lives is whole."""

    async def main() -> None:
        async with await connect(plane.descriptor) as client:
            values = np.arange(64 * 16384, dtype=np.int64).reshape(64, 16384)
            meta = await client.put("p", names(64), BatchData({"x": dense(values)}))
            full = (await client.stats()).bytes_used
            await client.clear("p", [key for key in meta.keys if key != "k40"])
            deadline = time.monotonic() + 10
            while (used := (await client.stats()).bytes_used) > full * (1 / 64 + 0.1):
                assert time.monotonic() < deadline, f"{used} of {full} bytes are still used"
                await asyncio.sleep(0.02)
            got = await client.get(meta.select_keys(["k40"]))
            assert got.dense("x").values.tolist() == [values[40].tolist()]

    asyncio.run(main())


def test_a_pickle_from_an_unknown_peer_is_not_run(plane: LocalPlane, tmp_path: Path) -> None:
    """Bare, as a msgpack extension, and inside a request: to the controller and to a unit."""
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
            stream.settimeout(5)
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
