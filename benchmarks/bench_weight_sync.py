"""Measure weight sync by engine against memcpy and verl's bucketed broadcast over gloo.

    uv run benchmarks/bench_weight_sync.py [--only shm,tcp] [--pairs 7] [--gib 1] [--smoke]
    uv run benchmarks/bench_weight_sync.py --relay 3,4 [--pairs 7] [--gib 1] [--smoke]

One version of a model (300 bfloat16 tensors of realistic shapes) goes from this process to one or
two others, which hold it, verified, in memory of their own: a receiver has two sets of tensors and
receives into the one that it does not use (`delta-*`: it applies the changes to a copy and copies
that). Three versions take turns, which differ in 1 % of the elements of every tensor, so nothing is
skipped and `delta-*` has changes to send. Each engine takes turns (harness/pairs.py) with memcpy of
the same tensors in this process, with itself without digests (every digest is a constant), and, for
one receiver, with verl's algorithm: two buckets, filled by copying, broadcast over gloo, copied out
by the receiver, no digests. Buckets hold 64 MiB everywhere.

CPU time is reported twice, in copies (CPU seconds of the memcpy): that of all processes, sender
included, divided by the number of receivers, and that of one receiver process alone.

With `-direct` the tensors are in the engine's buffer before the clock starts, as with a trainer
that exports straight into it. With `-shared` the receivers use the verified weights in the sender's
memory (engine `shm`), as a rollout engine on the CPU does; without, each copies them (engine
`shm-copy`). With `-after` the receivers begin when the version has been sent; without, those of
engines that declare `prefetches` begin with the sender, as in a sync of the manager. Both ways are
also compared with a sender that casts the same bytes from float32 to bfloat16 while it reads them,
as `rollout.dtype=bfloat16` does. The bars are in harness/weight_sync/bars.py. The ranking, a table
and a plot beside the JSON, has all engines that were run.

With `--relay`, so many receivers of engine `tcp` get the weights by the manager, in turns all from
the sender, and one of them from the sender and the others from it (harness/weight_sync/relay.py).
Here the network is loopback, as fast as memory; any other takes the longer, the more copies cross
it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from harness.pairs import Subject, cpu_seconds, paired, publish, summary, take_turns
from harness.weight_sync.bars import CPU_OF_ALL, CPU_OF_ONE, DIGESTS, DIRECT, PREFETCHED, SPEED, VERL, judged
from harness.weight_sync.relay import measure_relay

from rl_ckpt_engine import (
    CheckpointEngine,
    CheckpointEngineConfig,
    CheckpointEngineRegistry,
    Manifest,
    TensorSpec,
)
from rl_ckpt_engine.endpoints.cast_dtype import cast_all
from rl_ckpt_engine.engines.base import receive_buffer
from rl_ckpt_engine.engines.delta import delta_engine
from rl_ckpt_engine.payload import block_stream
from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.support.host.aligned_memory import aligned_bytes

ENGINES = ("shm-direct-shared", "shm-shared", "shm-direct", "shm", "tcp", "gloo", "ray", "disk", "delta-shm")
SHARED = "-shared"
AFTER = "-after"
CASTING = ("shm", "tcp")
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
    """Three versions of the model, each with other values of 1 % of the elements of each tensor.

    With two, a receiver's two buffers would hold what they receive already.
    """
    draw = np.random.default_rng(0)
    made: list[list[WeightTensor]] = [[], [], []]
    for number, shape in enumerate(shapes(gib)):
        words = (draw.standard_normal(int(np.prod(shape)), np.float32).view(np.uint32) >> 16).astype(np.uint16)
        places = draw.integers(0, words.size, max(1, words.size // 100))
        for change, version in enumerate(made):
            data = aligned_bytes(words.nbytes).view(np.uint16)  # as torch aligns tensors
            data[:] = words
            data[places] ^= change
            version.append(WeightTensor(f"model.layers.{number}.weight", "bfloat16", shape, data.view(np.uint8)))
    return made


class NoDigest:
    """Replace the digests of both ends by a constant that differs between versions."""

    def __init__(self) -> None:
        self.version = 0

    def update(self, piece: memoryview) -> None:
        """Read nothing."""

    def digest(self) -> bytes:
        """Return the constant."""
        return self.version.to_bytes(16, "little")

    @contextlib.contextmanager
    def instead(self) -> Iterator[None]:
        """Digests cost nothing inside."""
        real = (
            block_stream.digest_of,
            block_stream.combined,
            receive_buffer.TensorDigest,
            receive_buffer.tensor_digest,
            delta_engine.tensor_digest,
        )
        block_stream.digest_of, block_stream.combined = lambda _: b"", lambda _: self.digest()
        receive_buffer.TensorDigest = lambda: self
        receive_buffer.tensor_digest = delta_engine.tensor_digest = lambda _: self.digest()
        try:
            yield
        finally:
            (
                block_stream.digest_of,
                block_stream.combined,
                receive_buffer.TensorDigest,
                receive_buffer.tensor_digest,
                delta_engine.tensor_digest,
            ) = real


def receive_forever(pipe: Connection, engine_name: str, directory: str, digested: bool) -> None:
    """A rollout process: receives with an engine and keeps the tensors."""
    connect_to_ray(engine_name)
    bare = NoDigest()
    with contextlib.nullcontext() if digested else bare.instead():
        serve(pipe, engine_name, directory, bare)


def connect_to_ray(engine_name: str) -> None:
    """Join the benchmark's Ray cluster, which engine `ray` needs."""
    if engine_name == "ray":
        import ray

        if not ray.is_initialized():
            ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level="ERROR")


def serve(pipe: Connection, engine_name: str, directory: str, bare: NoDigest) -> None:
    """Serve until the pipe says stop."""
    engine = CheckpointEngineRegistry().create(engine_name, config(directory))
    mine: dict[str, np.ndarray] = {}
    pipe.send(engine.prepare())
    member = pipe.recv()
    engine.init_process_group(member)

    async def one(data: bytes) -> Callable[[], None]:
        """Receive a version; the tensors stay valid while the result is referenced."""
        manifest = Manifest.decode(data)
        bare.version = manifest.version
        weights = await engine.receive_weights(manifest, timeout_s=T)
        if engine.capabilities.shares:
            mine.update((weight.name, weight.data) for weight in weights)
            return engine.watch(manifest)
        for weight in weights:
            if weight.name not in mine:
                mine[weight.name] = np.empty_like(weight.data)
            np.copyto(mine[weight.name], weight.data)
        return partial(engine.confirm, manifest)

    async def all_versions() -> None:
        if not engine.capabilities.elastic:
            await engine.join(timeout_s=T)
        loop = asyncio.get_running_loop()
        while (data := await loop.run_in_executor(None, pipe.recv)) is not None:
            if isinstance(data, int):
                bare.version = data
                await engine.prefetch(data, timeout_s=T)
                continue
            watch = await one(data)  # the former version is in use until this one is there
            watch()
            pipe.send(xxhash.xxh3_128_hexdigest(b"".join(mine[name][:8].tobytes() for name in mine)))

    asyncio.run(all_versions())
    engine.close()


def config(directory: str) -> CheckpointEngineConfig:
    """Settings of both ends."""
    return CheckpointEngineConfig(directory=directory, bucket_mb=BUCKET / 2**20)


class Ours:
    """An engine and its receivers, with digests or without.

    With `cast` the bytes of the models are taken for float32 and cast to bfloat16.
    """

    def __init__(
        self,
        name: str,
        receivers: int,
        models: list[list[WeightTensor]],
        directory: str,
        *,
        digested: bool = True,
        cast: bool = False,
    ) -> None:
        self.cast = cast
        after, name = name.endswith(AFTER), name.removesuffix(AFTER)
        shared, name = name.endswith(SHARED), name.removesuffix(SHARED)
        self.direct, name = name.endswith(DIRECT), name.removesuffix(DIRECT)
        name = "shm-copy" if name == "shm" and not shared else name
        connect_to_ray(name)
        self.bare = None if digested else NoDigest()
        self.engine: CheckpointEngine = CheckpointEngineRegistry().create(name, config(directory))
        self.prefetches = self.engine.capabilities.prefetches and not after
        self.models = models
        self.version = 0
        self.loop = asyncio.new_event_loop()
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for _ in range(receivers):
            ours, theirs = _spawn.Pipe()
            process = _spawn.Process(target=receive_forever, args=(theirs, name, directory, digested), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)
        topology = self.engine.build_topology(self.engine.prepare(), [pipe.recv() for pipe in self.pipes])
        self.engine.init_process_group(topology.sender)
        for pipe, member in zip(self.pipes, topology.receivers, strict=True):
            pipe.send(member)
        if not self.engine.capabilities.elastic:
            self.loop.run_until_complete(self.engine.join(timeout_s=T))
        self.receiver_pids = [process.pid for process in self.processes]
        self.pids = [os.getpid(), *self.receiver_pids]
        self.receiver_cpu: list[float] = []  # seconds of one receiver, a number a sync
        self.next: list[WeightTensor] = []
        self.write()

    def write(self) -> None:
        """Put the next version into the trainer's or the engine's memory, untimed."""
        self.next = self.models[(self.version + 1) % len(self.models)]
        if self.direct:
            assert self.engine.capabilities.direct
            room = self.engine.room([TensorSpec(w.name, w.dtype, w.shape) for w in self.next])
            for weight, data in zip(self.next, room, strict=True):
                np.copyto(data, weight.data)
            self.next = [WeightTensor(w.name, w.dtype, w.shape, data) for w, data in zip(self.next, room, strict=True)]

    def step(self) -> None:
        """One whole sync."""
        self.version += 1
        before = cpu_seconds(self.receiver_pids)
        self._step()
        self.receiver_cpu.append((cpu_seconds(self.receiver_pids) - before) / len(self.receiver_pids))

    def _step(self) -> None:
        if self.bare is None:
            self.loop.run_until_complete(self._sync(self.next))
        else:
            self.bare.version = self.version
            with self.bare.instead():
                self.loop.run_until_complete(self._sync(self.next))

    async def _sync(self, model: list[WeightTensor]) -> None:
        if self.prefetches:
            for pipe in self.pipes:
                pipe.send(self.version)
        weights = cast_all(map(as_float32, model), "bfloat16") if self.cast else iter(model)
        manifest = await self.engine.send_weights(weights, self.version, timeout_s=T)
        for pipe in self.pipes:
            pipe.send(manifest.encode())
        if not self.engine.capabilities.elastic:
            await self.engine.serve(manifest, timeout_s=T)
        want = xxhash.xxh3_128_hexdigest(b"".join(w.data[:8].tobytes() for w in model))
        for got in [pipe.recv() for pipe in self.pipes]:
            assert self.cast or got == want  # of a cast, the digests alone say that it arrived
        self.engine.finalize(self.version)

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(20)
        self.engine.close()
        self.loop.close()


def as_float32(weight: WeightTensor) -> WeightTensor:
    """The same bytes as half as many elements."""
    return WeightTensor(weight.name, "float32", (weight.nbytes // 4,), weight.data[: weight.nbytes // 4 * 4])


def memcpy(model: list[WeightTensor]) -> Callable[[], None]:
    """Copy every tensor into warm memory."""
    targets = [aligned_bytes(weight.nbytes) for weight in model]
    for target in targets:
        target.fill(0)

    def copy() -> None:
        for weight, target in zip(model, targets, strict=True):
            np.copyto(target, weight.data)

    return copy


@contextlib.contextmanager
def opened(side: Any) -> Iterator[Any]:
    """Close the engine at exit."""
    try:
        yield side
    finally:
        side.close()


def measure(name: str, receivers: int, models: list[list[WeightTensor]], pairs: int, verl: Any) -> list[dict[str, Any]]:
    """Rows of one engine."""
    nbytes, me = sum(weight.nbytes for weight in models[0]), os.getpid()
    with (
        tempfile.TemporaryDirectory() as folder,
        opened(Ours(name, receivers, models, f"{folder}/ours")) as ours,
        opened(Ours(name, receivers, models, f"{folder}/bare", digested=False)) as bare,
    ):
        subjects = [
            Subject("ours", ours.step, ours.pids, ours.write),
            Subject("without digests", bare.step, bare.pids, bare.write),
            Subject("memcpy", memcpy(models[0]), [me]),
        ]
        if verl is not None:
            subjects.append(Subject("verl over gloo", verl.step, verl.pids))
        timings = take_turns(subjects, pairs, warm_up=4)  # each of the two slots of `shm` twice
    what = f"{name}, {receivers} receiver{'s' * (receivers > 1)}"
    figures = summary(timings, nbytes)
    wall = paired(timings, "memcpy", "ours")
    copies = paired(timings, "ours", "memcpy", "cpu")
    one_receiver = statistics.median(
        cpu / copy.cpu for cpu, copy in zip(ours.receiver_cpu[-pairs:], timings["memcpy"], strict=True)
    )
    bare_wall, bare_cpu = (
        paired(timings, "without digests", "ours"),
        paired(timings, "without digests", "memcpy", "cpu"),
    )

    rows = [
        judged(f"{what}: {SPEED}", wall["median"], ratio=wall, figures=figures),
        judged(
            f"{what}: {CPU_OF_ALL}",
            copies["median"] / receivers,
            ratio=copies,
            without_digests=bare_cpu["median"] / receivers,
        ),
        judged(f"{what}: {CPU_OF_ONE}", one_receiver),
        judged(f"{what}: {DIGESTS}", 1 - bare_wall["median"], ratio=bare_wall),
    ]
    if verl is not None:
        faster = paired(timings, "verl over gloo", "ours")
        rows.append(judged(f"{what}: {VERL}", faster["median"], ratio=faster))
    return rows


def measure_cast(name: str, models: list[list[WeightTensor]], pairs: int) -> dict[str, Any]:
    """What prefetching gains with one receiver if the sender casts."""
    with (
        tempfile.TemporaryDirectory() as folder,
        opened(Ours(name, 1, models, f"{folder}/with", cast=True)) as prefetching,
        opened(Ours(name + AFTER, 1, models, f"{folder}/after", cast=True)) as after,
    ):
        subjects = [
            Subject("prefetching", prefetching.step, prefetching.pids, prefetching.write),
            Subject("afterwards", after.step, after.pids, after.write),
        ]
        timings = take_turns(subjects, pairs, warm_up=4)
    wall = paired(timings, "prefetching", "afterwards")
    return judged(
        f"{name}, 1 receiver, cast to bfloat16: {PREFETCHED}",
        wall["median"],
        wall_ratio=wall,
        cpu_ratio=paired(timings, "prefetching", "afterwards", "cpu"),
        sides=summary(timings, sum(weight.nbytes for weight in models[0]) // 2),
    )


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Engines by speed, one bar for each number of receivers."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # not at the top: every receiver imports this module
    from matplotlib.figure import Figure

    speeds = {
        row["question"].partition(":")[0]: row["figures"]["ours"]["gib_per_s"] for row in rows if "figures" in row
    }
    ranked = sorted(speeds, key=lambda what: speeds[what])
    figure = Figure(figsize=(7.2, 0.4 * len(ranked) + 1.2), layout="constrained")
    FigureCanvasAgg(figure)
    ax = figure.subplots()
    colours = ["tab:blue" if what.endswith("1 receiver") else "tab:grey" for what in ranked]
    bars = ax.barh(ranked, [speeds[what] for what in ranked], color=colours)
    ax.bar_label(bars, fmt=" %.2g", fontsize=9)
    memcpy = max(row["figures"]["memcpy"]["gib_per_s"] for row in rows if "figures" in row)
    ax.axvline(memcpy, color="black", linewidth=1, linestyle="--")
    ax.annotate("memcpy ", (memcpy, 0), ha="right", fontsize=9)
    ax.set(xlabel="GiB of weights per second, from the first byte read to the last one loaded everywhere")
    ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


@contextlib.contextmanager
def ray_cluster(wanted: bool) -> Iterator[None]:
    """A local Ray cluster, if an engine needs one."""
    if not wanted:
        yield
        return
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"  # the processes of the cluster have this environment already
    import ray

    context = ray.init(
        address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=6 << 30
    )
    os.environ["RAY_ADDRESS"] = context.address_info["address"]
    try:
        yield
    finally:
        ray.shutdown()


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(ENGINES), help="engines, separated by commas")
    parser.add_argument("--relay", help="numbers of receivers, separated by commas, in place of engines")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument(
        "--smoke", action="store_true", help="16 MiB, 1 pair, 2 receivers for one engine alone, nothing written"
    )
    arguments = parser.parse_args()
    pairs, gib = (1, 1 / 64) if arguments.smoke else (arguments.pairs, arguments.gib)
    models = versions(gib)
    assert len(models[0]) == 300
    if arguments.relay:
        relayed = [measure_relay(int(count), models, pairs) for count in arguments.relay.split(",")]
        if not arguments.smoke:
            publish("weight_sync_relay", relayed)
        return
    names = arguments.only.split(",")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, ray_cluster("ray" in names):
        from peers.verl_broadcast import Verl  # torch is of no use to most receivers

        with opened(Verl(models[:2], BUCKET, str(Path(folder) / "store"))) as verl:
            for name in names:
                rows += measure(name, 1, models, pairs, verl)
        del verl
        if not arguments.smoke:
            rows += [measure_cast(name, models, pairs) for name in names if name in CASTING]
        for name in names[:1] if arguments.smoke else names:
            rows += measure(name, 2, models, pairs, None)
    if arguments.smoke:
        return
    whole = arguments.only == ",".join(ENGINES)
    path = publish("weight_sync" if whole else f"weight_sync_{'_'.join(sorted(names))}", rows)
    if path is not None:
        plot(rows, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
