"""`tqbridge` on both planes: reads, writes, the number of calls, and refusals."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_protocol import (
    BatchData,
    BatchError,
    ConfigError,
    KVBatchMeta,
    MissingDataError,
    SchemaError,
    dense,
)
from rl_protocol.testing.memory_data_plane import MemoryDataPlane
from rl_transferqueue import (
    BlockingPlane,
    Declaration,
    LocalPlane,
    Portal,
    Replicas,
    check_flow,
    connect_blocking,
    declaration,
    tqbridge,
)


class AsyncWorker:
    def __init__(self, plane: Any) -> None:
        self.plane = plane

    @tqbridge(reads=("x",), writes=("y", "z"))
    async def double(self, batch: BatchData, factor: int = 2) -> BatchData:
        """Doubles."""
        assert batch.field_names == ("x",)
        values = batch.dense("x").values
        return BatchData({"y": dense(values * factor), "z": dense(values + 1)})

    @tqbridge(reads=("y",))
    async def total(self, batch: BatchData) -> float:
        return float(batch.dense("y").values.sum())

    @tqbridge(reads=("x",), writes=("y",))
    async def wrong(self, batch: BatchData, how: str) -> Any:
        y = {"y": dense(np.zeros(len(batch) + (how == "rows")))}
        more = {"x": batch["x"]} if how == "more" else {}
        return None if how == "none" else BatchData(y | more)


class SyncWorker:
    def __init__(self, plane: Any, replicas: Replicas | None = None) -> None:
        self.plane = plane
        self.replicas = replicas
        self.seen: list[list[float]] = []

    @tqbridge(reads=("x",), writes=("y",))
    def double(self, batch: BatchData, factor: int = 2) -> BatchData:
        self.seen.append(batch.dense("x").values.tolist())
        return BatchData({"y": dense(batch.dense("x").values * factor)})


def rows(count: int) -> BatchData:
    return BatchData({"x": dense(np.arange(count, dtype=np.float64)), "other": dense(np.zeros(count))})


def test_an_async_method_reads_and_writes_what_it_declares() -> None:
    async def main() -> None:
        plane = MemoryDataPlane()
        meta = await plane.put("p", ["a", "b", "c"], rows(3), tags=[{"n": i} for i in range(3)])
        worker = AsyncWorker(plane)
        part = meta.select_keys(["c", "a"])
        out = await worker.double(part, factor=3)
        assert (out.keys, out.tags, out.fields) == (part.keys, part.tags, ("x", "other", "y", "z"))
        assert (await plane.get(out, ["y"])).dense("y").values.tolist() == [6.0, 0.0]
        assert await worker.total(out) == 6.0
        assert worker.double.__doc__ == "Doubles."

    asyncio.run(main())


def test_a_sync_method_uses_the_blocking_plane(plane: LocalPlane) -> None:
    client = connect_blocking(plane.descriptor)
    meta = client.put("p", ["a", "b"], rows(2))
    out = SyncWorker(client).double(meta)
    assert client.get(out, ["y"]).dense("y").values.tolist() == [0.0, 2.0]
    client.close()


def test_what_it_did_not_declare_is_refused_and_not_stored() -> None:
    async def main() -> None:
        plane = MemoryDataPlane()
        meta = await plane.put("p", ["a", "b"], rows(2))
        worker = AsyncWorker(plane)
        with pytest.raises(BatchError, match="got 2 rows and returned 3"):
            await worker.wrong(meta, "rows")
        with pytest.raises(SchemaError, match=r"wrong declares that it writes \['y'\]; it returned \['y', 'x'\]"):
            await worker.wrong(meta, "more")
        with pytest.raises(SchemaError, match="NoneType"):
            await worker.wrong(meta, how="none")
        with pytest.raises(BatchError, match="KVBatchMeta, not a BatchData"):
            await worker.double(rows(1))
        with pytest.raises(MissingDataError):
            await worker.total(meta)
        assert (await plane.list_rows("p")).fields == ("x", "other")

    asyncio.run(main())


class _Group:
    """A group of replicas, each of which is a thread of this process."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=60)
        self._message: bytes | None = None

    def rank(self, number: int) -> Replicas:
        group = self

        class Rank:
            leader = number == 0

            def share(self, message: bytes | None) -> bytes:
                if self.leader:
                    group._message = message
                group._barrier.wait()
                assert group._message is not None
                return group._message

        return Rank()


@pytest.fixture
def counted() -> Iterator[tuple[BlockingPlane, list[str]]]:
    """Yield a blocking in-memory plane and the list of calls that it has received."""
    calls: list[str] = []

    class Counting(MemoryDataPlane):
        async def get(self, *args: Any, **kwargs: Any) -> BatchData:
            calls.append("get")
            return await super().get(*args, **kwargs)

        async def put(self, *args: Any, **kwargs: Any) -> KVBatchMeta:
            calls.append("put")
            return await super().put(*args, **kwargs)

    portal = Portal()
    yield BlockingPlane(Counting(), portal), calls
    portal.close()


def test_replicas_fetch_and_write_once(counted: tuple[BlockingPlane, list[str]]) -> None:
    plane, calls = counted
    meta = plane.put("p", ["a", "b"], rows(2))
    calls.clear()
    group = _Group(3)
    workers = [SyncWorker(plane, group.rank(number)) for number in range(3)]
    results: list[KVBatchMeta] = []

    def work(worker: SyncWorker) -> None:
        results.append(worker.double(meta, factor=5))

    threads = [threading.Thread(target=work, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == ["get", "put"]
    assert [worker.seen for worker in workers] == [[[0.0, 1.0]]] * 3
    assert [set(result.fields) for result in results] == [{"x", "other", "y"}] * 3
    assert plane.get(meta, ["y"]).dense("y").values.tolist() == [0.0, 5.0]


RANK = """
import os, signal, sys
from datetime import timedelta
import torch.distributed as dist
from rl_protocol import BatchData, KVBatchMeta, WorkerError, dense
from rl_protocol.bridge.torch_replicas import TorchReplicas
from rl_transferqueue import PlaneDescriptor, connect_blocking, tqbridge

class Worker:
    @tqbridge(reads=["x"], writes=["y"])
    def double(self, batch):
        return BatchData({"y": dense(batch.dense("x").values * 2)})

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2, timeout=timedelta(seconds=120))
worker = Worker()
worker.plane = connect_blocking(PlaneDescriptor.from_json(sys.argv[3]))
worker.replicas = TorchReplicas()
meta = worker.double(KVBatchMeta(partition="p", keys=("a", "b"), fields=("x",)))
traffic = worker.plane.traffic()
print(worker.replicas.leader, meta.fields, traffic.data_read, traffic.data_written, flush=True)
if rank == 0:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    worker.double(meta)
except WorkerError as error:
    print("has ended" in str(error), flush=True)
"""


def test_ranks_of_a_torch_group_fetch_and_write_once(plane: LocalPlane, tmp_path: Path) -> None:
    here = connect_blocking(plane.descriptor)
    here.put("p", ["a", "b"], BatchData({"x": dense(np.array([1.0, 2.0], np.float32))}))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "meet"), plane.descriptor.to_json()],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=300)[0].splitlines() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert said == [["True ('x', 'y') 8 8"], ["False ('x', 'y') 0 0", "True"]]
    assert here.get(here.list_rows("p"), ["y"]).dense("y").values.tolist() == [2.0, 4.0]
    here.close()


def test_if_the_leader_cannot_fetch_no_rank_hangs(counted: tuple[BlockingPlane, list[str]]) -> None:
    plane, _ = counted
    group = _Group(2)
    errors: list[BaseException] = []

    def work(worker: SyncWorker) -> None:
        try:
            worker.double(KVBatchMeta(partition="p", keys=("ghost",)))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(SyncWorker(plane, group.rank(n)),)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [type(error) for error in errors] == [MissingDataError, MissingDataError]
    assert all("ghost" in str(error) for error in errors)
    assert sum("the leader of this rank's replica could not fetch" in str(error) for error in errors) == 1


def test_the_graph_is_checked_before_anything_starts() -> None:
    double, total = declaration(AsyncWorker.double), declaration(AsyncWorker.total)
    assert double == Declaration("double", ("x",), ("y", "z"))
    check_flow([double, total], given=["x"])
    with pytest.raises(
        ConfigError, match=r"Step 'total' reads column 'y', which no earlier step writes; there are \['x'\]"
    ):
        check_flow([total, double], given=["x"])
    with pytest.raises(ConfigError, match="'x'"):
        check_flow([double, total])
    with pytest.raises(ConfigError, match="'double' writes column 'y', which is written by step 'double' already"):
        check_flow([double, double], given=["x"])
    with pytest.raises(ConfigError, match="'z', which is written before the first step"):
        check_flow([double], given=["x", "z"])
    with pytest.raises(ConfigError, match="decorate it with tqbridge"):
        declaration(rows)
    with pytest.raises(ConfigError, match="declared once"):
        tqbridge(reads=("x", "x"))
