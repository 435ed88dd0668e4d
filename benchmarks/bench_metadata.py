"""Measure the control plane against TransferQueue 0.1.11: latency, rates, memory, stalls.

    uv run --group bench benchmarks/bench_metadata.py [--rounds 9] [--smoke]
        [--only small,lists,stall,memory,growth,million]

Clients are separate processes, one set per plane, and take turns (harness/pairs.py). All calls are
the async ones, awaited on the client's own loop, so neither side pays for a waiting thread.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import multiprocessing
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from harness.pairs import Timing, cpu_seconds, paired, publish, rss_mib, summary, verdict
from peers.transferqueue import PeerPlane, connect_peer, peer_planes, use_peer

from rl_protocol import BatchData, dense, ragged
from rl_transferqueue import LocalPlane, PlaneDescriptor, TransferQueueConfig, connect, start_local_plane

_spawn = multiprocessing.get_context("spawn")
Op = Callable[[int], Awaitable[object]]


# --------------------------------------------------------------------------------
# what clients do
async def _serve_ours(text: str, pipe: Connection) -> None:
    async with await connect(PlaneDescriptor.from_json(text)) as client:
        row = BatchData({"x": dense(np.zeros((1, 16), np.float32))})
        me = os.getpid()

        async def put(i: int) -> None:
            await client.put("p", [f"{me}-{i}"], row, tags=[{"status": "done"}])

        async def get(i: int) -> None:
            meta = await client.put("q", [f"{me}-{i}"], row) if i % 256 == 0 else metas[i % len(metas)]
            await client.get(meta, ["x"])

        async def tag(i: int) -> None:
            await client.put("t", [f"{me}-{i % 64}"], tags=[{"status": i}])

        async def wait(_: int) -> None:
            with contextlib.suppress(TimeoutError):
                await client.wait_ready("never", count=8, fields=["x"], task="t", timeout_s=6)

        metas = [await client.put("g", [f"{me}-{i}"], row) for i in range(512)]
        await _obey(pipe, {"put": put, "get": get, "tag": tag, "wait": wait})


async def _serve_peer(pipe: Connection, client: Any) -> None:
    import torch

    tq = use_peer(client)
    me = os.getpid()
    value = torch.zeros(16)

    async def put(i: int) -> None:
        await tq.async_kv_put(key=f"{me}-{i}", partition_id="p", fields={"x": value}, tag={"status": "done"})

    async def get(i: int) -> None:
        await tq.async_kv_batch_get(keys=[f"{me}-{i % 512}"], partition_id="g", select_fields=["x"])

    async def tag(i: int) -> None:
        await tq.async_kv_put(key=f"{me}-{i % 64}", partition_id="t", tag={"status": i})

    async def wait(_: int) -> None:
        with contextlib.suppress(RuntimeError):  # how the timeout of its controller arrives
            await client.async_get_meta(
                data_fields=["x"], batch_size=8, partition_id="never", mode="fetch", task_name="t"
            )

    for i in range(512):
        await tq.async_kv_put(key=f"{me}-{i}", partition_id="g", fields={"x": value})
    await _obey(pipe, {"put": put, "get": get, "tag": tag, "wait": wait})


async def _obey(pipe: Connection, ops: dict[str, Op]) -> None:
    """Run operations one after the other for the given time; return the seconds of each."""
    numbers = itertools.count()
    loop = asyncio.get_running_loop()
    pipe.send("ready")
    while True:
        wish = await loop.run_in_executor(None, pipe.recv)
        if wish is None:
            return
        name, seconds = wish
        op, took = ops[name], []
        end = time.perf_counter() + seconds
        while True:
            start = time.perf_counter()
            if start >= end:
                break
            await op(next(numbers))
            took.append(time.perf_counter() - start)
        pipe.send(took)


def _client(kind: str, info: Any, pipe: Connection) -> None:
    if kind == "ours":
        asyncio.run(_serve_ours(info, pipe))
    else:
        client = connect_peer(info, "client")
        client._run_coroutine(_serve_peer(pipe, client))
        os._exit(0)


class Clients:
    """Client processes of one plane."""

    def __init__(self, name: str, info: Any, number: int, pids: list[int]) -> None:
        self.name = name
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for _ in range(number):
            here, there = _spawn.Pipe()
            kind = "ours" if name == "ours" else "peer"
            process = _spawn.Process(target=_client, args=(kind, info, there), daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)
        for pipe in self._pipes:
            assert pipe.recv() == "ready"
        self.pids = [*pids, *(process.pid for process in self._processes)]

    def start(self, op: str, seconds: float, clients: range) -> None:
        for i in clients:
            self._pipes[i].send((op, seconds))

    def take(self, clients: range) -> list[list[float]]:
        return [self._pipes[i].recv() for i in clients]

    def run(self, op: str, seconds: float, clients: range) -> list[list[float]]:
        self.start(op, seconds, clients)
        return self.take(clients)

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.send(None)
            process.join(20)


@contextlib.contextmanager
def clients_of(planes: list[tuple[str, Any, list[int]]], number: int) -> Iterator[list[Clients]]:
    """Start `count` client processes for each plane."""
    with contextlib.ExitStack() as stack:
        out = []
        for name, info, pids in planes:
            out.append(Clients(name, info, number, pids))
            stack.callback(out[-1].close)
        yield out


# --------------------------------------------------------------------------------
# questions
def small(sides: list[Clients], rounds: int, seconds: float, most: int) -> list[dict[str, Any]]:
    """Latency of small rows and rate of tag updates, for one client and for `most`."""
    rows = []
    for op, what in (("put", "kv_put of a small row"), ("get", "get of a small row")):
        for number in (1, most):
            p50: dict[str, list[Timing]] = {side.name: [] for side in sides}
            p99: dict[str, list[float]] = {side.name: [] for side in sides}
            for turn in range(-1, rounds):
                for side in sides:
                    cpu = cpu_seconds(side.pids)
                    took = [t for one in side.run(op, seconds, range(number)) for t in one]
                    cpu = (cpu_seconds(side.pids) - cpu) / len(took)
                    if turn >= 0:
                        p50[side.name].append(Timing(statistics.median(took), cpu))
                        p99[side.name].append(float(np.quantile(took, 0.99)))
            ratios = {side.name: paired(p50, side.name, "ours") for side in sides[1:]}
            best = min(ratios, key=lambda name: ratios[name]["median"])
            figures = summary(p50)
            for name, values in p99.items():
                figures[name]["p99_ms"] = float(f"{statistics.median(values) * 1e3:.4g}")
            rows.append(
                verdict(
                    f"{what}, p50, {number} client{'s' if number > 1 else ''}",
                    ratios[best]["median"],
                    30 if (op, number) == ("put", most) else 10,
                    30,
                    at_least=True,
                    ratios=ratios,
                    cpu_ratios={side.name: paired(p50, side.name, "ours", "cpu")["median"] for side in sides[1:]},
                    figures=figures,
                )
            )
    rates: dict[str, list[float]] = {side.name: [] for side in sides}
    cost: dict[str, list[float]] = {side.name: [] for side in sides}
    for turn in range(-1, rounds):
        for side in sides:
            cpu = cpu_seconds(side.pids)
            count = sum(len(one) for one in side.run("tag", seconds, range(most)))
            if turn >= 0:
                rates[side.name].append(count / seconds)
                cost[side.name].append((cpu_seconds(side.pids) - cpu) / count * 1e6)
    best = max(statistics.median(rates[side.name]) for side in sides[1:])
    value = min(
        statistics.median(a / b for a, b in zip(rates["ours"], rates[side.name], strict=True)) for side in sides[1:]
    )
    figures = {
        name: {"per_s": round(statistics.median(rates[name])), "cpu_us": round(statistics.median(cost[name]))}
        for name in rates
    }
    rows.append(
        verdict(f"tag updates per second, {most} clients", value, 20, 30, at_least=True, figures=figures, best=best)
    )
    return rows


def stall(sides: list[Clients], seconds: float) -> list[dict[str, Any]]:
    """Longest tag update of one client while another waits for rows that never come."""
    worst: dict[str, dict[str, float]] = {}
    for side in sides:
        alone = side.run("tag", seconds, range(1))[0]
        side.start("wait", 0.1, range(1, 2))
        time.sleep(0.2)
        beside = side.run("tag", seconds, range(1))[0]
        side.take(range(1, 2))
        worst[side.name] = {"alone_ms": max(alone) * 1e3, "beside_a_waiter_ms": max(beside) * 1e3}
    ours = worst["ours"]
    value = max(0.0, ours["beside_a_waiter_ms"] - ours["alone_ms"])
    question = "longest stall that a waiting consumer adds for others, ms"
    return [verdict(question, value, 20, 5, at_least=False, figures=worst)]


async def lists(
    descriptor: PlaneDescriptor, peers: list[PeerPlane], rounds: int, sizes: tuple[int, int]
) -> list[dict[str, Any]]:
    """List the metadata of many keys, and the changes among them."""
    import torch
    from tensordict import TensorDict

    rows: list[dict[str, Any]] = []
    async with await connect(descriptor) as client:
        others = {peer.name: connect_peer(peer.info, "lists") for peer in peers}
        for size in sizes:
            keys, partition = [f"key-{i}" for i in range(size)], f"lists{size}"
            columns = {f"c{i}": np.zeros((size, 1), np.float32) for i in range(6)}
            await client.put(
                partition, keys, BatchData({n: dense(v) for n, v in columns.items()}), tags=[{"s": 1}] * size
            )
            data = TensorDict({n: torch.from_numpy(v) for n, v in columns.items()}, batch_size=size)
            for other in others.values():
                use_peer(other).kv_batch_put(keys=keys, partition_id=partition, fields=data, tags=[{"s": 1}] * size)
            fields = list(columns)
            version = (await client.watch(partition, timeout_s=1)).version
            timings: dict[str, list[Timing]] = {}
            names = ["ours", "ours watch", *others, *(f"{name} list" for name in others)]
            for turn in range(-1, rounds):
                for name in names:
                    if name == "ours watch":
                        await client.put(partition, [f"new-{turn}"], tags=[{"s": 2}])
                    start = time.perf_counter()
                    if name == "ours":
                        meta = await client.list_rows(partition, fields=fields)
                        assert len(meta) >= size
                        assert len(meta.fields) == 6
                    elif name == "ours watch":
                        changes = await client.watch(partition, since=version, timeout_s=1)
                        assert changes.rows.keys == (f"new-{turn}",)
                        version = changes.version
                    elif name.endswith(" list"):
                        found = use_peer(others[name.removesuffix(" list")]).kv_list(partition_id=partition)
                        assert len(found[partition]) >= size
                    else:
                        assert others[name].kv_retrieve_meta(keys=keys, partition_id=partition).size == size
                    took = time.perf_counter() - start
                    if turn >= 0:
                        timings.setdefault(name, []).append(Timing(took, took))
            ratios = {name: paired(timings, name, "ours") for name in others}
            value = min(ratio["median"] for ratio in ratios.values())
            figures = {name: row["wall_ms"] for name, row in summary(timings).items()}
            rows.append(
                verdict(
                    f"metadata of {size} keys",
                    value,
                    10 if size == sizes[-1] else 5,
                    10,
                    at_least=True,
                    ratios=ratios,
                    wall_ms=figures,
                )
            )
            if size == sizes[-1]:
                ratios = {name: paired(timings, f"{name} list", "ours watch") for name in others}
                value = min(ratio["median"] for ratio in ratios.values())
                rows.append(
                    verdict(
                        f"watch after one new key among {size}, against their kv_list",
                        value,
                        100,
                        200,
                        at_least=True,
                        ratios=ratios,
                        wall_ms=figures,
                    )
                )
                ms = figures["ours watch"]
                rows.append(verdict(f"watch after one new key among {size}, ms", ms, 3, 1, at_least=False))
            await client.clear(partition)
        for other in others.values():
            other.close()
    return rows


async def memory(peer: PeerPlane, samples: int) -> list[dict[str, Any]]:
    """Growth of the controller's resident memory per million (row, column)."""
    columns, step = 8, min(samples, 8192)
    cells = samples * columns / 1e6
    rows: list[dict[str, Any]] = []
    for kind, must, aim in (("dense", 25, 15), ("with jagged lengths and 3 tags", 72, 43)):
        tagged = kind != "dense"
        with start_local_plane(TransferQueueConfig(capacity_mb=512)) as plane:
            async with await connect(plane.descriptor) as client:
                await client.put("warm", ["a"], BatchData({"c": dense([1.0])}), tags=[{"a": 1}])
                before = rss_mib(plane.pids[0])
                for first in range(0, samples, step):
                    keys = [f"sample-{i}" for i in range(first, first + step)]
                    await client.put("p", keys, _columns(step, columns, jagged=tagged), tags=_tags(first, step, tagged))
                ours = (rss_mib(plane.pids[0]) - before) / cells
        theirs = _peer_memory(peer, samples, columns, step, tagged) / cells
        what = f"controller memory per million sample-fields, {kind}, MiB"
        rows.append(verdict(what, ours, must, aim, at_least=False, theirs=theirs))
    return rows


def _columns(rows: int, columns: int, *, jagged: bool) -> BatchData:
    if jagged:
        return BatchData({f"c{i}": ragged([[1.0] * (r % 3) for r in range(rows)], "float32") for i in range(columns)})
    return BatchData({f"c{i}": dense(np.zeros((rows, 1), np.float32)) for i in range(columns)})


def _tags(first: int, rows: int, tagged: bool) -> list[dict[str, Any]] | None:
    return [{"status": "done", "version": 7, "length": i} for i in range(first, first + rows)] if tagged else None


def _peer_memory(peer: PeerPlane, samples: int, columns: int, step: int, tagged: bool) -> float:
    import torch
    from tensordict import TensorDict

    client = connect_peer(peer.info, "memory")
    before = rss_mib(peer.pids[0])
    partition = f"memory{tagged}"
    for first in range(0, samples, step):
        batch = _columns(step, columns, jagged=tagged)
        values: dict[str, torch.Tensor] = {}
        for name in batch.field_names:
            flat = torch.from_numpy(np.array(batch[name].buffers[0]))
            values[name] = (
                torch.nested.nested_tensor_from_jagged(flat, torch.from_numpy(np.array(batch.ragged(name).offsets)))
                if tagged
                else flat
            )
        use_peer(client).kv_batch_put(
            keys=[f"sample-{i}" for i in range(first, first + step)],
            partition_id=partition,
            fields=TensorDict(values, batch_size=step),
            tags=_tags(first, step, tagged),
        )
    grown = rss_mib(peer.pids[0]) - before
    client.close()
    return grown


async def growth(rounds: int, few: int) -> list[dict[str, Any]]:
    """Check that the cost of adding rows one by one grows linearly."""
    row = BatchData({f"c{i}": dense(np.zeros((1, 4), np.float32)) for i in range(8)})
    seconds: dict[int, list[float]] = {few: [], 4 * few: []}
    with start_local_plane(TransferQueueConfig(capacity_mb=512)) as plane:
        async with await connect(plane.descriptor) as client:
            for _ in range(rounds):
                for size, took in seconds.items():
                    start = cpu_seconds([plane.pids[0]])
                    for i in range(size):
                        await client.put("p", [f"k{i}"], row)
                    took.append(cpu_seconds([plane.pids[0]]) - start)
                    await client.clear("p")
    ratio = statistics.median(b / a for a, b in zip(seconds[few], seconds[4 * few], strict=True))
    figures = {str(size): statistics.median(took) for size, took in seconds.items()}
    return [
        verdict(
            f"controller CPU of {4 * few} against {few} inserts one by one",
            ratio,
            4.5,
            4.1,
            at_least=False,
            cpu_s=figures,
        )
    ]


# --------------------------------------------------------------------------------
# a million rows of 16 columns
def _produce(text: str, number: int, rows: int, step: int, rate: float) -> None:
    async def main() -> None:
        async with await connect(PlaneDescriptor.from_json(text)) as client:
            batch = BatchData({f"c{i}": dense(np.zeros((step, 1), np.float32)) for i in range(16)})
            start = time.monotonic()
            for first in range(0, rows, step):
                await asyncio.sleep(max(0.0, start + first / rate - time.monotonic()))
                await client.put("million", [f"{number}-{i}" for i in range(first, first + step)], batch)

    asyncio.run(main())


async def million(rows: int) -> list[dict[str, Any]]:
    """`wait_ready` on 1024 rows and 16 columns while 4 producers write and none clears."""
    producers, step = 4, 512
    took: list[float] = []
    with start_local_plane(TransferQueueConfig(capacity_mb=1024)) as plane:
        async with await connect(plane.descriptor) as client:
            rate = rows / producers / (rows / 40_000)
            processes = [
                _spawn.Process(
                    target=_produce, args=(plane.descriptor.to_json(), n, rows // producers, step, rate), daemon=True
                )
                for n in range(producers)
            ]
            for process in processes:
                process.start()
            consumed = 0
            fields = [f"c{i}" for i in range(16)]
            while consumed < rows:
                produced = (await client.stats()).rows.get("million", 0)
                if produced < min(rows, consumed + 4096):
                    await asyncio.sleep(0.005)
                    continue
                start = time.perf_counter()
                meta = await client.wait_ready("million", count=1024, fields=fields, task="t", timeout_s=60)
                took.append(time.perf_counter() - start)
                consumed += len(meta)
            for process in processes:
                process.join(60)
            live = (await client.stats()).rows["million"]
    p99 = float(np.quantile(took, 0.99)) * 1e3
    figures = {
        "rows_live": live,
        "calls": len(took),
        "p50_ms": statistics.median(took) * 1e3,
        "max_ms": max(took) * 1e3,
    }
    return [
        verdict("wait_ready of 1024 among 1 million rows x 16, p99 ms", p99, 20, 10, at_least=False, figures=figures)
    ]


def main() -> None:
    """Compare, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--smoke", action="store_true", help="one short round of few rows, nothing written")
    parser.add_argument("--only", default="small,lists,stall,memory,growth,million")
    arguments = parser.parse_args()
    smoke = arguments.smoke
    rounds, seconds, most = (1, 0.1, 2) if smoke else (arguments.rounds, 0.5, 4)
    only = set(arguments.only.split(","))
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        plane: LocalPlane = stack.enter_context(start_local_plane(TransferQueueConfig(capacity_mb=512)))
        peers = (
            stack.enter_context(peer_planes(*((1,) if smoke else (1, 2))))
            if only & {"small", "lists", "stall", "memory"}
            else []
        )
        everyone = [
            ("ours", plane.descriptor.to_json(), list(plane.pids)),
            *((peer.name, peer.info, peer.pids) for peer in peers),
        ]
        if only & {"small", "stall"}:
            with clients_of(everyone, most) as sides:
                rows += small(sides, rounds, seconds, most) if "small" in only else []
                rows += stall(sides, 0.5 if smoke else 3.0) if "stall" in only else []
        rows += (
            asyncio.run(lists(plane.descriptor, peers, rounds, (64, 512) if smoke else (8192, 65536)))
            if "lists" in only
            else []
        )
        rows += asyncio.run(memory(peers[0], 1 << 10 if smoke else 1 << 17)) if "memory" in only else []
    rows += asyncio.run(growth(1 if smoke else 3, 128 if smoke else 8192)) if "growth" in only else []
    rows += asyncio.run(million(20_000 if smoke else 1_000_000)) if "million" in only else []
    if not smoke:
        publish("_".join(["metadata", *sorted(only)]), rows)


if __name__ == "__main__":
    main()
