"""Measure put and get on one host against TransferQueue 0.1.11 and memcpy.

    uv run --group bench benchmarks/bench_data_plane.py [--pairs 9] [--smoke]
        [--only put,get,latency,gather]
    uv run --group bench benchmarks/bench_data_plane.py --tcp [--pairs 9] [--smoke]

All planes live at the same time and take turns (harness/pairs.py); each has one client, in this
process. Payloads: `dense` is 1024 rows x 9 columns of 8192 float32; `mixed` is 1024 rows x (3 such
columns, 3 jagged float32 columns of 1..16384 values, 2 columns of strings of 0.5..3.5 KiB).
Each side takes its native type: TransferQueue a TensorDict, ours arrays and a list of strings,
whose encoding is timed.

With --tcp shared memory is off: our units listen at 127.0.0.2 and the client comes from 127.0.0.1.
The payload is `dense`. `bare sockets` moves the same columns to another process by sendmsg and
recv_into a warm buffer and waits for one byte: the cost of TCP itself.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from harness.pairs import Subject, Timing, against, paired, publish, summary, take_turns, verdict
from peers.transferqueue import PeerPlane, connect_peer, peer_planes, use_peer
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorStack

from rl_protocol import BatchData, ColumnSpec, DenseColumn, KVBatchMeta, ObjectColumn, RaggedColumn
from rl_transferqueue import Client, TransferQueueConfig, connect, start_local_plane

T = TypeVar("T")
ROWS, WIDTH, COLUMNS = 1024, 8192, 9
_spawn = multiprocessing.get_context("spawn")


class Payload:
    """The same rows as arrays and as tensors."""

    def __init__(self, kind: str, width: int) -> None:
        rng = np.random.default_rng(7)
        dense = COLUMNS if kind == "dense" else 3
        self.dense = {f"d{i}": rng.random((ROWS, width), np.float32) for i in range(dense)}
        self.ragged: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self.strings: dict[str, list[str]] = {}
        if kind == "mixed":
            for i in range(3):
                lengths = rng.integers(1, 2 * width, ROWS)
                offsets = np.concatenate([[0], np.cumsum(lengths)])
                self.ragged[f"r{i}"] = (rng.random(int(offsets[-1]), np.float32), offsets)
            for i in range(2):
                self.strings[f"s{i}"] = ["ab\u00fc " * n for n in rng.integers(100, 700, ROWS).tolist()]
        self.nbytes = (
            sum(a.nbytes for a in self.dense.values())
            + sum(values.nbytes for values, _ in self.ragged.values())
            + sum(len(text.encode()) for column in self.strings.values() for text in column)
        )

    def batch(self) -> BatchData:
        return BatchData(
            {name: DenseColumn(values, "float32") for name, values in self.dense.items()}
            | {name: RaggedColumn(values, offsets, "float32") for name, (values, offsets) in self.ragged.items()}
            | {name: ObjectColumn.from_values(texts) for name, texts in self.strings.items()}
        )

    def tensordict(self) -> TensorDict:
        columns: dict[str, Any] = {name: torch.from_numpy(values) for name, values in self.dense.items()}
        for name, (values, offsets) in self.ragged.items():
            columns[name] = torch.nested.nested_tensor_from_jagged(torch.from_numpy(values), torch.from_numpy(offsets))
        for name, texts in self.strings.items():
            columns[name] = NonTensorStack(*texts)
        return TensorDict(columns, batch_size=ROWS)


def touch(values: np.ndarray) -> float:
    """Read one word of every page."""
    return float(values.reshape(-1)[::1024].sum())


def read_ours(batch: BatchData) -> list[Any]:
    """Touch every page; make all strings."""
    out: list[Any] = []
    for name, column in batch.columns.items():
        out.append(batch.objects(name).values() if column.kind == "object" else touch(column.buffers[0]))
    return out


def read_peer(data: TensorDict) -> list[Any]:
    """Touch every page; make all strings."""
    out: list[Any] = []
    for value in data.values():
        if isinstance(value, torch.Tensor):
            out.append(touch((value.values() if value.is_nested else value).numpy()))
        else:
            out.append(value.tolist())
    return out


class Ours:
    """One client of our plane."""

    def __init__(self, loop: asyncio.AbstractEventLoop, client: Client, pids: list[int], payload: Payload) -> None:
        self.run: Callable[[Awaitable[T]], T] = loop.run_until_complete  # type: ignore[assignment]
        self.client, self.pids, self.payload = client, pids, payload
        self.meta = KVBatchMeta(partition="p", keys=())
        self.last: BatchData | None = None
        self.numbers = itertools.count()

    def put(self) -> None:
        number = next(self.numbers)
        self.meta = self.run(self.client.put("p", [f"{number}-{i}" for i in range(ROWS)], self.payload.batch()))

    def clear(self) -> None:
        self.last = None
        self.run(self.client.clear("p"))

    def get(self) -> None:
        self.last = self.run(self.client.get(self.meta))
        read_ours(self.last)

    def forget(self) -> None:
        """Return metadata without locations, as of rows this client has not seen."""
        self.clear()
        self.put()


class Peer:
    """One client of a TransferQueue."""

    def __init__(self, plane: PeerPlane, payload: Payload) -> None:
        self.client = connect_peer(plane.info, "bench")
        self.name, self.pids, self.payload = plane.name, plane.pids, payload
        self.data = payload.tensordict()
        self.numbers = itertools.count()
        self.keys: list[str] = []
        self.last: Any = None

    def put(self) -> None:
        number = next(self.numbers)
        self.keys = [f"{number}-{i}" for i in range(ROWS)]
        use_peer(self.client).kv_batch_put(keys=self.keys, partition_id="p", fields=self.data)

    def clear(self) -> None:
        self.last = None
        use_peer(self.client).kv_clear(keys=self.keys, partition_id="p")

    def get(self) -> None:
        self.last = use_peer(self.client).kv_batch_get(keys=self.keys, partition_id="p")
        read_peer(self.last)


def memcpy(payload: Payload) -> Callable[[], None]:
    """Copy the same arrays to memory that was touched before."""
    pairs = [(np.ones_like(a), a) for a in (*payload.dense.values(), *(v for v, _ in payload.ragged.values()))]

    def copy() -> None:
        for target, source in pairs:
            np.copyto(target, source)

    return copy


def in_place(ours: Ours) -> Callable[[], None]:
    """A put of rows written in place; alloc and fill run untimed in `Subject.reset`."""

    def put() -> None:
        number = next(ours.numbers)
        ours.run(ours.client.put("p", [f"{number}-{i}" for i in range(ROWS)], ours.draft))  # type: ignore[attr-defined]

    return put


def draft(ours: Ours, width: int) -> None:
    columns = [ColumnSpec(name=f"d{i}", kind="dense", dtype="float32", dims=(width,)) for i in range(COLUMNS)]
    ours.draft = ours.run(ours.client.alloc(columns, ROWS))  # type: ignore[attr-defined]
    for column in columns:
        ours.draft[column.name][:] = ours.payload.dense[column.name]  # type: ignore[attr-defined]


def compare(ours: Ours, peers: list[Peer], pairs: int, kind: str, only: set[str]) -> list[dict[str, Any]]:
    """Put and get of one payload."""
    me, names, nbytes = os.getpid(), [peer.name for peer in peers], ours.payload.nbytes
    rows: list[dict[str, Any]] = []
    if "put" in only:
        subjects = [
            Subject("ours", ours.put, [me, *ours.pids], ours.clear),
            *(Subject(peer.name, peer.put, [me, *peer.pids], peer.clear) for peer in peers),
            Subject("memcpy", memcpy(ours.payload), [me]),
        ]
        timings = take_turns(subjects, pairs)
        must, aim = (4, 5) if kind == "dense" else (9, 9)
        rows.append(against(f"put, {kind}", timings, names, must, aim, figures=summary(timings, nbytes)))
        if kind == "dense":
            ratio = paired(timings, "ours", "memcpy")
            cpu = paired(timings, "ours", "memcpy", "cpu")
            rows.append(
                verdict("put, time against a warm memcpy", ratio["median"], 3, 1.5, at_least=False, wall=ratio, cpu=cpu)
            )
    if "get" in only:
        for side in (ours, *peers):
            side.put()
        subjects = [
            Subject("ours", ours.get, [me, *ours.pids], ours.forget),
            *(Subject(peer.name, peer.get, [me, *peer.pids]) for peer in peers),
        ]
        timings = take_turns(subjects, pairs)
        for peer in peers:
            theirs = peer.last
            assert ours.last is None
            got = ours.run(ours.client.get(ours.meta))
            assert [x if isinstance(x, list) else round(x, 1) for x in read_ours(got)] == [
                x if isinstance(x, list) else round(x, 1) for x in (read_peer(theirs.select(*got.field_names)))
            ], "what was read differs"
        must, aim = (130, 130) if kind == "dense" else (30, 30)
        what = "every page touched" if kind == "dense" else "every page touched, all strings decoded"
        rows.append(against(f"get, {kind}, {what}", timings, names, must, aim, figures=summary(timings, nbytes)))
        for side in (ours, *peers):
            side.clear()
    return rows


def latency(ours: Ours, pairs: int, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Latency of a get without copies by MiB, for rows with and without known locations."""
    first: dict[int, list[float]] = {}
    again: dict[int, list[float]] = {}
    few, many = sizes[0], sizes[-1]
    for turn in range(-1, pairs):
        for mib in sizes if turn % 2 else sizes[::-1]:
            data = BatchData({"x": DenseColumn(np.zeros((256, mib << 12), np.uint8), "uint8")})
            meta = ours.run(ours.client.put("p", [str(i) for i in range(256)], data))
            for times in (first, again):
                start = time.perf_counter()
                got = ours.run(ours.client.get(meta))
                if turn >= 0:
                    times.setdefault(mib, []).append(time.perf_counter() - start)
                del got
            ours.run(ours.client.clear("p"))
    rows = []
    for what, times in (("", first), (" again", again)):
        ms = {f"{mib} MiB": float(f"{statistics.median(times[mib]) * 1e3:.4g}") for mib in sizes}
        growth = statistics.median(b / a for a, b in zip(times[few], times[many], strict=True))
        rows.append(
            verdict(f"get{what}, growth from {few} to {many} MiB", growth, 2, 1.2, at_least=False, median_ms=ms)
        )
    return rows


def gather(ours: Ours, pairs: int) -> list[dict[str, Any]]:
    """Half of the rows in random order, against index_select of the same columns."""
    ours.put()
    rng = np.random.default_rng(3)
    tensors = [torch.from_numpy(values) for values in ours.payload.dense.values()]
    chosen = rng.permutation(ROWS)[: ROWS // 2]

    def get() -> None:
        ours.last = ours.run(ours.client.get(ours.meta.select_rows(chosen)))

    kept: list[Any] = []

    def select() -> None:
        rows = torch.from_numpy(chosen)
        kept[:] = [torch.index_select(tensor, 0, rows) for tensor in tensors]

    def drop() -> None:
        kept.clear()
        ours.last = None

    me = os.getpid()
    timings = take_turns(
        [Subject("ours", get, [me, *ours.pids], drop), Subject("index_select", select, [me], drop)], pairs
    )
    ours.clear()
    ratio = paired(timings, "ours", "index_select")
    return [
        verdict(
            "gather of half the rows, time against index_select",
            ratio["median"],
            1.5,
            1.2,
            at_least=False,
            wall=ratio,
            figures=summary(timings, ours.payload.nbytes // 2),
        )
    ]


def alloc(ours: Ours, pairs: int, width: int) -> list[dict[str, Any]]:
    """A put of columns that were written in place."""
    draft(ours, width)

    def reset() -> None:
        ours.clear()
        draft(ours, width)

    me = os.getpid()
    copy = memcpy(ours.payload)
    timings: dict[str, list[Timing]] = take_turns(
        [Subject("ours", in_place(ours), [me, *ours.pids], reset), Subject("memcpy", copy, [me])], pairs
    )
    ours.draft.discard()  # type: ignore[attr-defined]
    ours.clear()
    ratio = paired(timings, "ours", "memcpy")
    return [
        verdict(
            "put of rows written in place, time against a warm memcpy",
            ratio["median"],
            1.5,
            0.2,
            at_least=False,
            wall=ratio,
            figures=summary(timings, ours.payload.nbytes),
        )
    ]


def drain(port: int, nbytes: int) -> None:
    """Receive `nbytes` bytes into one buffer repeatedly; answer each time with one byte."""
    with socket.create_connection(("127.0.0.2", port)) as peer:
        memory = memoryview(np.ones(nbytes, np.uint8))
        while True:
            left = memory
            while left:
                got = peer.recv_into(left[: 256 << 10])
                if not got:
                    return
                left = left[got:]
            peer.sendall(b"k")


@contextlib.contextmanager
def bare_sockets(payload: Payload) -> Iterator[Subject]:
    """Send the columns to another process, without a data plane."""
    with socket.create_server(("127.0.0.2", 0)) as server:
        process = _spawn.Process(target=drain, args=(server.getsockname()[1], payload.nbytes), daemon=True)
        process.start()
        peer = server.accept()[0]
    with peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        columns = [memoryview(values).cast("B") for values in payload.dense.values()]

        def send() -> None:
            for column in columns:
                peer.sendall(column)
            peer.recv(1)

        yield Subject("bare sockets", send, [os.getpid(), process.pid or 0])
    process.join(10)


def compare_over_tcp(ours: Ours, peers: list[Peer], pairs: int) -> list[dict[str, Any]]:
    """Put and get without shared memory."""
    me, nbytes, names = os.getpid(), ours.payload.nbytes, [peer.name for peer in peers]
    rows: list[dict[str, Any]] = []
    with bare_sockets(ours.payload) as bare:
        subjects = [
            Subject("ours", ours.put, [me, *ours.pids], ours.clear),
            *(Subject(peer.name, peer.put, [me, *peer.pids], peer.clear) for peer in peers),
            Subject("memcpy", memcpy(ours.payload), [me]),
            bare,
        ]
        timings = take_turns(subjects, pairs)
        figures = summary(timings, nbytes)
        rows.append(against("TCP put", timings, names, 1, 3, figures=figures))
        for to, must, aim in (("memcpy", 4, 2.5), ("bare sockets", 1.5, 1.2)):
            wall, cpu = paired(timings, "ours", to), paired(timings, "ours", to, "cpu")
            what = f"TCP put, time against {to}"
            rows.append(verdict(what, wall["median"], must, aim, at_least=False, wall=wall, cpu=cpu))
        for side in (ours, *peers):
            side.put()
        subjects = [
            Subject("ours", ours.get, [me, *ours.pids], lambda: setattr(ours, "last", None)),
            *(Subject(peer.name, peer.get, [me, *peer.pids]) for peer in peers),
            Subject("memcpy", memcpy(ours.payload), [me]),
            bare,
        ]
        timings = take_turns(subjects, pairs)
        rows.append(against("TCP get, every page touched", timings, names, 4, 7, figures=summary(timings, nbytes)))
        wall, cpu = paired(timings, "ours", "bare sockets"), paired(timings, "ours", "bare sockets", "cpu")
        what = "TCP get, time against bare sockets"
        rows.append(verdict(what, wall["median"], 1.5, 1.2, at_least=False, wall=wall, cpu=cpu))
    got = ours.run(ours.client.get(ours.meta))
    assert all((got.dense(name).values == values).all() for name, values in ours.payload.dense.items())
    return rows


def over_tcp(pairs: int, width: int, units: Sequence[int]) -> list[dict[str, Any]]:
    """All comparisons over TCP."""
    config = TransferQueueConfig(capacity_mb=1400, num_storage_units=2, listen="127.0.0.2", shared_memory=False)
    with contextlib.ExitStack() as stack:
        loop = asyncio.new_event_loop()
        stack.callback(loop.close)
        plane = stack.enter_context(start_local_plane(config))
        client = loop.run_until_complete(connect(plane.descriptor))
        stack.callback(lambda: loop.run_until_complete(client.close()))
        peers = stack.enter_context(peer_planes(*units))
        payload = Payload("dense", width)
        ours = Ours(loop, client, list(plane.pids), payload)
        sides = [Peer(peer, payload) for peer in peers]
        rows = compare_over_tcp(ours, sides, pairs)
        for side in sides:
            side.client.close()
    return rows


def in_memory(
    pairs: int, width: int, units: Sequence[int], sizes: Sequence[int], only: set[str]
) -> list[dict[str, Any]]:
    """The comparisons of these names on one host, with shared memory."""
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        loop = asyncio.new_event_loop()
        stack.callback(loop.close)
        plane = stack.enter_context(start_local_plane(TransferQueueConfig(capacity_mb=2400, num_storage_units=2)))
        client = loop.run_until_complete(connect(plane.descriptor))
        stack.callback(lambda: loop.run_until_complete(client.close()))
        peers = stack.enter_context(peer_planes(*units)) if only & {"put", "get"} else []
        for kind in ("dense", "mixed"):
            payload = Payload(kind, width)
            ours = Ours(loop, client, list(plane.pids), payload)
            sides = [Peer(peer, payload) for peer in peers]
            rows += compare(ours, sides, pairs, kind, only)
            for side in sides:
                side.client.close()
            if kind == "dense":
                rows += gather(ours, pairs) if "gather" in only else []
                rows += alloc(ours, pairs, width) if "alloc" in only else []
        rows += latency(ours, pairs, sizes) if "latency" in only else []
    return rows


def main() -> None:
    """Compare, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--smoke", action="store_true", help="an eighth of the bytes and less, 1 pair, nothing written")
    parser.add_argument("--only", default="put,get,latency,gather,alloc")
    parser.add_argument("--tcp", action="store_true", help="put and get over TCP, without shared memory")
    arguments = parser.parse_args()
    pairs, width = (1, WIDTH // 8) if arguments.smoke else (arguments.pairs, WIDTH)
    units, sizes = ((1,), (1, 4)) if arguments.smoke else ((1, 2), (16, 64, 256, 512))
    torch.set_num_threads(1)
    only = set(arguments.only.split(","))
    rows = over_tcp(pairs, width, units) if arguments.tcp else in_memory(pairs, width, units, sizes, only)
    if not arguments.smoke:
        publish("transport" if arguments.tcp else "data_plane", rows)


if __name__ == "__main__":
    main()
