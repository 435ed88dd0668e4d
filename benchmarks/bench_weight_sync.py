"""How fast do weights go from a trainer to rollout processes, by engine, against memcpy and verl's bucketed broadcast over gloo?

    uv run benchmarks/bench_weight_sync.py [--only shm,tcp] [--pairs 5] [--gib 1] [--smoke]

One version of a model (300 bfloat16 tensors of realistic shapes) goes from this process to one or two others, which verify it and copy it into
tensors of their own; consecutive versions differ in 1 % of the elements of every tensor, so nothing is skipped, and `delta-*` has something to
do. Each engine takes turns (see pairs.py) with memcpy of the same tensors in this process, with one xxh3-128 over them, and, for one receiver,
with verl's algorithm: two buckets, filled by copying, broadcast over gloo, copied out by the receiver, no digests. Buckets hold 64 MiB everywhere.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from pairs import Subject, paired, publish, summary, take_turns, verdict

from rl_ckpt_engine import CheckpointEngine, CheckpointEngineConfig, CheckpointEngineRegistry, GroupEngine, Manifest
from rl_protocol.weights import WeightTensor

ENGINES = ("shm", "tcp", "gloo", "disk", "delta-shm")
BUCKET = 64 << 20
T = 120.0
_spawn = multiprocessing.get_context("spawn")


def shapes(gib: float) -> list[tuple[int, ...]]:
    """300 tensors: an embedding, a head, and 37 layers of 8, the size of all being `gib`."""
    hidden = int((gib * 2**30 / 2 / (37 * 12 + 2 * 32)) ** 0.5)
    layer: list[tuple[int, ...]] = [(hidden, hidden)] * 4 + [
        (4 * hidden, hidden),
        (hidden, 4 * hidden),
        (hidden,),
        (hidden,),
    ]
    return [(32 * hidden, hidden), *layer * 37, (hidden,), (hidden,), (32 * hidden, hidden)]


def versions(gib: float) -> list[list[WeightTensor]]:
    """Two versions of the model; every tensor differs."""
    draw = np.random.default_rng(0)
    first: list[WeightTensor] = []
    second: list[WeightTensor] = []
    for number, shape in enumerate(shapes(gib)):
        words = (draw.standard_normal(int(np.prod(shape)), np.float32).view(np.uint32) >> 16).astype(np.uint16)
        changed = words.copy()
        changed[draw.integers(0, words.size, max(1, words.size // 100))] ^= 1
        for version, data in ((first, words), (second, changed)):
            version.append(WeightTensor(f"model.layers.{number}.weight", "bfloat16", shape, data.view(np.uint8)))
    return [first, second]


def receive_forever(pipe: Connection, engine_name: str, directory: str) -> None:
    """A rollout process: receives with an engine into tensors of its own."""
    engine = CheckpointEngineRegistry().create(engine_name, config(directory))
    mine: dict[str, np.ndarray] = {}
    pipe.send(engine.prepare())
    member = pipe.recv()
    engine.init_process_group(member)

    async def one(data: bytes) -> None:
        for weight in await engine.receive_weights(Manifest.decode(data), timeout_s=T):
            if weight.name not in mine:
                mine[weight.name] = np.empty_like(weight.data)
            np.copyto(mine[weight.name], weight.data)

    async def serve() -> None:
        if isinstance(engine, GroupEngine):
            await engine.join(timeout_s=T)
        loop = asyncio.get_running_loop()
        while (data := await loop.run_in_executor(None, pipe.recv)) is not None:
            await one(data)
            pipe.send(xxhash.xxh3_128_hexdigest(b"".join(mine[name][:8].tobytes() for name in mine)))

    asyncio.run(serve())
    engine.close()


def config(directory: str) -> CheckpointEngineConfig:
    """The same for both ends."""
    return CheckpointEngineConfig(directory=directory, bucket_mb=BUCKET / 2**20)


class Ours:
    """An engine and its receivers."""

    def __init__(self, name: str, receivers: int, models: list[list[WeightTensor]], directory: str) -> None:
        self.engine: CheckpointEngine = CheckpointEngineRegistry().create(name, config(directory))
        self.models = models
        self.version = 0
        self.loop = asyncio.new_event_loop()
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for _ in range(receivers):
            ours, theirs = _spawn.Pipe()
            process = _spawn.Process(target=receive_forever, args=(theirs, name, directory), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)
        topology = self.engine.build_topology(self.engine.prepare(), [pipe.recv() for pipe in self.pipes])
        self.engine.init_process_group(topology.sender)
        for pipe, member in zip(self.pipes, topology.receivers, strict=True):
            pipe.send(member)
        if isinstance(self.engine, GroupEngine):
            self.loop.run_until_complete(self.engine.join(timeout_s=T))
        self.pids = [os.getpid(), *(process.pid for process in self.processes)]

    def step(self) -> None:
        """One whole sync."""
        self.version += 1
        self.loop.run_until_complete(self._sync(self.models[self.version % 2]))

    async def _sync(self, model: list[WeightTensor]) -> None:
        manifest = await self.engine.send_weights(iter(model), self.version, timeout_s=T)
        for pipe in self.pipes:
            pipe.send(manifest.encode())
        if isinstance(self.engine, GroupEngine):
            await self.engine.serve(manifest, timeout_s=T)
        want = xxhash.xxh3_128_hexdigest(b"".join(w.data[:8].tobytes() for w in model))
        for pipe in self.pipes:
            assert pipe.recv() == want
        self.engine.finalize(self.version)

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(20)
        self.engine.close()
        self.loop.close()


def verl_receiver(pipe: Connection, store: str, tensors: list[tuple[str, int]]) -> None:
    """Rank 1 of verl's algorithm: receive a bucket while the last one is copied out."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=1, world_size=2)
    mine = {name: torch.empty(size, dtype=torch.uint8) for name, size in tensors}
    buckets = [torch.zeros(BUCKET, dtype=torch.uint8) for _ in range(2)]
    pipe.send(None)
    while (metas := pipe.recv()) is not None:
        turn = 0
        work = dist.broadcast(buckets[0], 0, async_op=True)
        while metas:
            work.wait()
            ahead = pipe.recv()
            if ahead:
                work = dist.broadcast(buckets[1 - turn], 0, async_op=True)
            for name, at, start, size in metas:
                mine[name][at : at + size].copy_(buckets[turn][start : start + size])
            metas, turn = ahead, 1 - turn
        pipe.send(None)
    dist.destroy_process_group()


class Verl:
    """Rank 0: pack bucket k + 1 while bucket k is broadcast; what a bucket holds goes ahead of it, pickled."""

    def __init__(self, models: list[list[WeightTensor]], store: str) -> None:
        self.models = [
            [(w.name, torch.frombuffer(w.data.copy(), dtype=torch.uint8)) for w in model] for model in models
        ]
        self.pipe, theirs = _spawn.Pipe()
        sizes = [(name, data.numel()) for name, data in self.models[0]]
        self.process = _spawn.Process(target=verl_receiver, args=(theirs, store, sizes), daemon=True)
        self.process.start()
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=2)
        self.buckets = [torch.zeros(BUCKET, dtype=torch.uint8) for _ in range(2)]
        self.pipe.recv()
        self.pids = [os.getpid(), self.process.pid or 0]
        self.version = 0

    def step(self) -> None:
        """One whole sync."""
        self.version += 1
        metas: list[tuple[str, int, int, int]] = []
        filled, turn = 0, 0
        work = None

        def flush() -> None:
            nonlocal metas, filled, turn, work
            self.pipe.send(metas)
            if work is not None:
                work.wait()
            work = dist.broadcast(self.buckets[turn], 0, async_op=True)
            metas, filled, turn = [], 0, 1 - turn

        for name, data in self.models[self.version % 2]:
            at = 0
            while at < data.numel():
                size = min(BUCKET - filled, data.numel() - at)
                self.buckets[turn][filled : filled + size].copy_(data[at : at + size])
                metas.append((name, at, filled, size))
                at, filled = at + size, filled + size
                if filled == BUCKET:
                    flush()
        if metas:
            flush()
        assert work is not None
        work.wait()
        self.pipe.send([])
        self.pipe.recv()

    def close(self) -> None:
        self.pipe.send(None)
        dist.destroy_process_group()
        self.process.join(20)


def memcpy(model: list[WeightTensor]) -> Callable[[], None]:
    """Copy every tensor into warm memory."""
    targets = [np.zeros_like(weight.data) for weight in model]

    def copy() -> None:
        for weight, target in zip(model, targets, strict=True):
            np.copyto(target, weight.data)

    return copy


def digest(model: list[WeightTensor]) -> None:
    """One xxh3-128 of every tensor."""
    for weight in model:
        xxhash.xxh3_128_digest(weight.data.data)


@contextlib.contextmanager
def opened(side: Any) -> Iterator[Any]:
    """Closed afterwards."""
    try:
        yield side
    finally:
        side.close()


def measure(
    name: str, receivers: int, models: list[list[WeightTensor]], pairs: int, verl: Verl | None
) -> list[dict[str, Any]]:
    """Rows of one engine."""
    nbytes, me = sum(weight.nbytes for weight in models[0]), os.getpid()
    with tempfile.TemporaryDirectory() as folder, opened(Ours(name, receivers, models, folder)) as ours:
        subjects = [
            Subject("ours", ours.step, ours.pids),
            Subject("memcpy", memcpy(models[0]), [me]),
            Subject("xxh3-128", lambda: digest(models[0]), [me]),
        ]
        if verl is not None:
            subjects.append(Subject("verl over gloo", verl.step, verl.pids))
        timings = take_turns(subjects, pairs)
    what = f"{name}, {receivers} receiver{'s' * (receivers > 1)}"
    figures = summary(timings, nbytes)
    wall = paired(timings, "memcpy", "ours")
    copies = paired(timings, "ours", "memcpy", "cpu")
    hashing = 2 * paired(timings, "xxh3-128", "ours")["median"]
    bars = {"shm": (0.45, 0.6), "delta-shm": (0.2, 0.45)}.get(name, (0.1, 0.3))
    rows = [
        verdict(f"{what}: speed against memcpy", wall["median"], *bars, at_least=True, ratio=wall, figures=figures),
        verdict(
            f"{what}: CPU in copies, per receiver",
            copies["median"] / receivers,
            2.4 if name == "shm" else 12,
            2,
            at_least=False,
            ratio=copies,
        ),
        verdict(
            f"{what}: digests of both ends, share of the time",
            hashing,
            0.2 if name == "shm" else 0.4,
            0.1,
            at_least=False,
        ),
    ]
    if verl is not None:
        faster = paired(timings, "verl over gloo", "ours")
        rows.append(
            verdict(
                f"{what}: times faster than verl's over gloo", faster["median"], 1.5, 2, at_least=True, ratio=faster
            )
        )
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(ENGINES), help="engines, separated by commas")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--smoke", action="store_true", help="16 MiB, 2 pairs, nothing written")
    arguments = parser.parse_args()
    pairs, gib = (2, 1 / 64) if arguments.smoke else (arguments.pairs, arguments.gib)
    torch.set_num_threads(1)
    models = versions(gib)
    assert len(models[0]) == 300
    names = arguments.only.split(",")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        with opened(Verl(models, str(Path(folder) / "store"))) as verl:
            for name in names:
                rows += measure(name, 1, models, pairs, verl)
        for name in names:
            rows += measure(name, 2, models, pairs, None)
    if not arguments.smoke:
        publish(
            "weight_sync" if arguments.only == ",".join(ENGINES) else f"weight_sync_{'_'.join(sorted(names))}", rows
        )


if __name__ == "__main__":
    main()
