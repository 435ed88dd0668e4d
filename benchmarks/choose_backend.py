"""Recommend a data-plane backend for a payload.

    uv run --group bench benchmarks/choose_backend.py [--turns 30] [--smoke]
        [--payload benchmarks/payloads/vision_language.yaml]
        [--backends simple,ray,mooncake,transferqueue]

Puts and gets the payload through every installed backend in turns, with one client in this process
that touches every page it gets. Prints a table, a recommendation with its reasons, and how to
install what is missing. `harness/backend_choice.py` describes payload files.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import itertools
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from harness.backend_choice import BACKENDS, INSTALL, Measured, make_batch, read_payload, recommend, table
from harness.pairs import Subject, Timing, publish, take_turns
from harness.results import ROOT
from peers.transferqueue import PeerPlane, connect_peer, use_peer
from ppo_step.cluster import ray_pids, ray_session
from ppo_step.compute import touch

from rl_protocol import BatchData, KVBatchMeta
from rl_protocol.torch import from_tensordict, to_tensordict
from rl_transferqueue import TransferQueueConfig, connect, start_local_plane

EXAMPLE = ROOT / "benchmarks" / "payloads" / "vision_language.yaml"
UNITS = 2


class Side(Protocol):
    """One client of one backend; it holds the payload at most once."""

    pids: Callable[[], list[int]]

    def put(self) -> None:
        """Store the payload under new keys."""
        ...

    def get(self) -> None:
        """Read all of it and touch every page."""
        ...

    def clear(self) -> None:
        """Clear it."""
        ...


class OurSide:
    """A backend of rl_transferqueue."""

    def __init__(
        self, descriptor: Any, pids: Callable[[], list[int]], data: BatchData, stack: contextlib.ExitStack
    ) -> None:
        self.pids, self._data, self._loop = pids, data, asyncio.new_event_loop()
        self._client = self._loop.run_until_complete(connect(descriptor))
        stack.callback(self._loop.close)
        stack.callback(lambda: self._loop.run_until_complete(self._client.close()))
        self._numbers = itertools.count()
        self._meta = KVBatchMeta(partition="p", keys=())

    def put(self) -> None:
        number = next(self._numbers)
        keys = [f"{number}-{row}" for row in range(len(self._data))]
        self._meta = self._loop.run_until_complete(self._client.put("p", keys, self._data))

    def get(self) -> None:
        touch(self._loop.run_until_complete(self._client.get(self._meta)))

    def clear(self) -> None:
        self._loop.run_until_complete(self._client.clear("p"))


class PeerSide:
    """TransferQueue 0.1.11."""

    def __init__(self, plane: PeerPlane, data: BatchData) -> None:
        self.pids = lambda: plane.pids
        self._client, self._data = connect_peer(plane.info, "choice"), to_tensordict(data)
        self._numbers, self._keys = itertools.count(), list[str]()

    def put(self) -> None:
        number = next(self._numbers)
        self._keys = [f"{number}-{row}" for row in range(self._data.batch_size[0])]
        use_peer(self._client).kv_batch_put(keys=self._keys, partition_id="p", fields=self._data)

    def get(self) -> None:
        touch(from_tensordict(use_peer(self._client).kv_batch_get(keys=self._keys, partition_id="p")))

    def clear(self) -> None:
        use_peer(self._client).kv_clear(keys=self._keys, partition_id="p")


def missing(backend: str) -> str:
    """Why a backend can't run here; empty if it can."""
    modules = {"ray": "ray", "mooncake": "mooncake.store", "transferqueue": "transfer_queue"}
    if backend in modules:
        try:
            importlib.import_module(modules[backend])
        except (ImportError, OSError) as error:
            return f"{error}. Install it: {INSTALL[backend]}"
    return ""


@contextlib.contextmanager
def mooncake_master() -> Iterator[str]:
    """Run a Mooncake master on loopback; yields host:port."""
    import mooncake  # pyright: ignore[reportMissingImports] - an extra

    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        port, metrics = one.getsockname()[1], two.getsockname()[1]
    command = [str(Path(mooncake.__path__[0]) / "mooncake_master"), "-rpc_address=127.0.0.1", f"-rpc_port={port}"]
    command += ["-enable_metric_reporting=false", "-metrics_host=127.0.0.1", f"-metrics_port={metrics}"]
    os.environ.setdefault("RL_TQ_MOONCAKE_HOST", "127.0.0.1")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as master:
        try:
            deadline = time.monotonic() + 20
            while socket.socket().connect_ex(("127.0.0.1", port)):
                if time.monotonic() > deadline:
                    raise TimeoutError("mooncake_master did not come up within 20 s")
                time.sleep(0.1)
            yield f"127.0.0.1:{port}"
        finally:
            master.terminate()


def open_side(backend: str, data: BatchData, stack: contextlib.ExitStack) -> Side:
    """Start a backend and a client of it; the stack closes them."""
    capacity = max(64, 3 * UNITS * data.nbytes >> 20)
    if backend == "transferqueue":
        plane = PeerPlane(UNITS)
        stack.callback(plane.close)
        return PeerSide(plane, data)
    address = ""
    if backend == "ray":
        address = stack.enter_context(ray_session(6 * data.nbytes))
    elif backend == "mooncake":
        address = stack.enter_context(mooncake_master())
    config = TransferQueueConfig(
        capacity_mb=capacity, num_storage_units=UNITS, backend=backend, backend_address=address
    )
    ours = stack.enter_context(start_local_plane(config))
    return OurSide(ours.descriptor, lambda: [*ours.pids, *(ray_pids() if backend == "ray" else [])], data, stack)


def resident_bytes(pids: list[int]) -> int:
    """Resident memory of processes, shared memory included."""
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return pages * os.sysconf("SC_PAGE_SIZE")


def held(side: Side) -> int:
    """How far the memory of a backend rises when it holds its first payload."""
    before = resident_bytes(side.pids())
    side.put()
    after = resident_bytes(side.pids())
    side.clear()
    return max(after - before, 0)


def measured(name: str, memory: int, puts: list[Timing], gets: list[Timing]) -> Measured:
    """Medians and p99 of one backend."""

    def p99(timings: list[Timing]) -> float:
        return float(np.quantile([t.wall for t in timings], 0.99))

    return Measured(
        backend=name,
        put_s=statistics.median(t.wall for t in puts),
        get_s=statistics.median(t.wall for t in gets),
        put_p99_s=p99(puts),
        get_p99_s=p99(gets),
        put_cpu_s=statistics.median(t.cpu for t in puts),
        get_cpu_s=statistics.median(t.cpu for t in gets),
        memory_bytes=memory,
    )


def measure(sides: dict[str, Side], turns: int) -> list[Measured]:
    """All backends in turns."""
    me = os.getpid()
    memory = {name: held(side) for name, side in sides.items()}
    pids = {name: [me, *side.pids()] for name, side in sides.items()}
    puts = take_turns([Subject(name, side.put, pids[name], side.clear) for name, side in sides.items()], turns)
    for side in sides.values():
        side.put()

    def renew(side: Side) -> None:
        side.clear()
        side.put()

    subjects = [Subject(name, side.get, pids[name], lambda side=side: renew(side)) for name, side in sides.items()]
    gets = take_turns(subjects, turns)
    return [measured(name, memory[name], puts[name], gets[name]) for name in sides]


def main() -> int:
    """Measure the installed backends and recommend one; exit code 1 if none is installed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--payload", type=Path, default=EXAMPLE)
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--write", action="store_true", help="write the result, if the working tree is clean")
    parser.add_argument("--smoke", action="store_true", help="8 rows, 2 turns, nothing written")
    arguments = parser.parse_args()
    wanted = arguments.backends.split(",")
    if unknown := [name for name in wanted if name not in BACKENDS]:
        parser.error(f"there is no backend {unknown[0]!r}; choose from {', '.join(BACKENDS)}")
    try:
        spec = read_payload(arguments.payload)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    turns = 2 if arguments.smoke else arguments.turns
    data = make_batch(spec).slice(0, 8) if arguments.smoke else make_batch(spec)
    torch.set_num_threads(1)
    reasons = {name: missing(name) for name in wanted}
    with contextlib.ExitStack() as stack:
        sides = {name: open_side(name, data, stack) for name in wanted if not reasons[name]}
        found = measure(sides, turns)
    rows = [one.row(arguments.payload.stem, data.nbytes, spec.reads) for one in found]
    if rows:
        print(
            f"{arguments.payload.name}: {len(data)} rows, {data.nbytes / 2**20:.1f} MiB, {turns} turns\n\n{table(rows)}\n"
        )
    for name, reason in reasons.items():
        if reason:
            print(f"missing: {name}: {reason}")
    if not found:
        print("No backend could be measured.", file=sys.stderr)
        return 1
    best, why = recommend(found, spec.reads)
    print(
        f"recommended: transfer_queue.backend={best}"
        if best != "transferqueue"
        else "recommended: TransferQueue 0.1.11"
    )
    print("\n".join(f"  - {reason}" for reason in why))
    if arguments.write and not arguments.smoke:
        publish(f"backends_{arguments.payload.stem}", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
