"""Many clients and rows with processes killed at random, and memory use over many cycles."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from rl_protocol import BatchData, dense
from rl_transferqueue import Client, LocalPlane, TransferQueueConfig, connect, start_local_plane

# A producer prints "put FIRST" before it puts the rows from FIRST, and "ack FIRST" after the plane
# has acknowledged them. After a kill, a new producer starts at the last FIRST that was printed.
# A consumer claims rows for a task, reads them and prints their numbers. If it is killed in
# between, the plane has the claimed rows as consumed, but no consumer has printed them.
PRODUCER = """
import asyncio, sys
import numpy as np
from rl_protocol import BatchData, dense
from rl_transferqueue import PlaneDescriptor, connect

async def main(descriptor, first, last, step):
    async with await connect(PlaneDescriptor.from_json(descriptor)) as client:
        for start in range(first, last, step):
            rows = range(start, min(start + step, last))
            print("put", start, flush=True)
            await client.put("p", [str(row) for row in rows], BatchData({"x": dense(np.array(rows, np.int64))}), timeout_s=120)
            print("ack", start, flush=True)

asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
"""
CONSUMER = """
import asyncio, sys
from rl_protocol import PlaneTimeout
from rl_transferqueue import PlaneDescriptor, connect

async def main(descriptor, task, step):
    async with await connect(PlaneDescriptor.from_json(descriptor)) as client:
        while True:
            try:
                meta = await client.wait_ready("p", count=step, fields=["x"], task=task, timeout_s=1)
            except PlaneTimeout:
                meta = await client.list_rows("p", fields=["x"], task=task)
                if not meta or len(meta) >= step:
                    continue
                meta = await client.claim("p", meta.keys, task=task)
            rows = (await client.get(meta, ["x"])).dense("x").values.tolist()
            assert rows == [int(key) for key in meta.keys]
            print(*rows, flush=True)

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""


class Worker:
    """A client process that writes its output to a file, so that a kill loses no output."""

    def __init__(self, folder: Path, name: str, code: str, *arguments: object) -> None:
        self.output = folder / name
        with self.output.open("wb") as out, (folder / f"{name}.err").open("wb") as err:
            command = [sys.executable, "-c", code, *map(str, arguments)]
            self.process = subprocess.Popen(command, stdout=out, stderr=err)

    def lines(self) -> list[list[str]]:
        """Return the complete lines so far, each as a list of words."""
        return [line.split() for line in self.output.read_text().split("\n")[:-1]]

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def killed_at_the_end(workers: list[Worker]) -> Iterator[None]:
    try:
        yield
    finally:
        for worker in workers:
            if worker.process.poll() is None:
                worker.kill()


def run_chaos(plane: LocalPlane, folder: Path, *, rows: int, pairs: int, step: int, kills: int, seed: int) -> None:
    """Run `pairs` producers and `pairs` consumers, and check that every row is delivered once.

    Half of the consumers serve each of two tasks. `kills` processes are killed at random times and
    replaced.
    """
    rng = random.Random(seed)
    descriptor = plane.descriptor.to_json()
    share = rows // pairs
    producers: dict[int, Worker] = {}
    consumers: dict[int, Worker] = {}
    everyone: list[Worker] = []
    tasks = ["train", "score"]
    unprinted = kills * step
    """A killed consumer may have claimed `step` rows without printing them."""

    def start_producer(number: int, first: int) -> None:
        name = f"p{number}-{len(everyone)}"
        producers[number] = Worker(folder, name, PRODUCER, descriptor, first, (number + 1) * share, step)
        everyone.append(producers[number])

    def start_consumer(number: int) -> None:
        name = f"c{number}-{len(everyone)}"
        consumers[number] = Worker(folder, name, CONSUMER, descriptor, tasks[number % 2], step)
        everyone.append(consumers[number])

    async def finished() -> None:
        async with await connect(plane.descriptor) as client:
            left, deadline = kills, time.monotonic() + 600
            while True:
                assert time.monotonic() < deadline, "the rows were not all delivered in time"
                await asyncio.sleep(rng.uniform(0.05, 0.3) if left else 0.5)
                if left:
                    left -= 1
                    number = rng.randrange(pairs)
                    if rng.random() < 0.5:
                        producers[number].kill()
                        last = producers[number].lines()
                        start_producer(number, int(last[-1][1]) if last else number * share)
                    else:
                        consumers[number].kill()
                        start_consumer(number)
                    continue
                if all(worker.process.poll() == 0 for worker in producers.values()) and await consumed(client):
                    return

    async def consumed(client: Client) -> bool:
        return not any([await client.list_rows("p", task=task) for task in tasks])

    def printed(task: int) -> Counter[int]:
        """Return how often the consumers of a task have printed each row."""
        said = Counter[int]()
        for worker in everyone:
            if worker.output.name[0] == "c" and int(worker.output.name[1 : worker.output.name.index("-")]) % 2 == task:
                said.update(int(word) for line in worker.lines() for word in line)
        return said

    async def check() -> None:
        async with await connect(plane.descriptor) as client:
            there = (await client.list_rows("p")).keys
            assert Counter(map(int, there)) == Counter(range(rows))
            for i, task in enumerate(tasks):
                flags = await client.consumption_status("p", task=task)
                assert flags.flags.all()
                said = printed(i)
                assert not [row for row, times in said.items() if times > 1], "a row was delivered twice"
                assert rows - unprinted <= len(said) <= rows

    for number in range(pairs):
        start_producer(number, number * share)
        start_consumer(number)
    with killed_at_the_end(everyone):
        asyncio.run(finished())
        # The consumers have claimed every row, and now print the last ones.
        deadline = time.monotonic() + 60
        while any(len(printed(i)) < rows - unprinted for i in range(len(tasks))) and time.monotonic() < deadline:
            time.sleep(0.1)
    asyncio.run(check())


def test_every_row_is_delivered_once_whichever_process_dies(tmp_path: Path) -> None:
    with start_local_plane(TransferQueueConfig(capacity_mb=64, segment_mb=1)) as plane:
        run_chaos(plane, tmp_path, rows=4000, pairs=2, step=50, kills=3, seed=1)


@pytest.mark.nightly
def test_two_million_rows_are_delivered_once_whichever_process_dies(tmp_path: Path) -> None:
    """8 producers and 8 consumers of 2 tasks: every row is delivered once to each task."""
    with start_local_plane(TransferQueueConfig(capacity_mb=512)) as plane:
        run_chaos(plane, tmp_path, rows=2_000_000, pairs=8, step=1000, kills=12, seed=2)


# --------------------------------------------------------------------------------
# Memory
def resident(pid: int) -> int:
    """Return the resident memory of a process, anonymous and shared, in KiB."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0])


@pytest.mark.slow
def test_memory_of_every_process_comes_back_over_a_thousand_cycles() -> None:
    """In every process, 1000 more cycles increase the resident memory by at most 5 %."""

    async def cycle(client: Client, number: int) -> None:
        keys = [f"{number}-{i}" for i in range(64)]
        data = BatchData({"x": dense(np.full((64, 4096), number, np.int64)), "y": dense(np.arange(64))})
        meta = await client.put("p", keys, data, tags=[{"n": number}] * 64)
        got = await client.get(meta if number % 2 else meta.select_rows(list(range(0, 64, 3))))
        assert (got.dense("x").values == number).all()
        await client.wait_ready("p", count=64, task="t", timeout_s=60)
        await client.clear("p", None if number % 3 else keys)

    async def main(plane: LocalPlane) -> None:
        pids = [os.getpid(), *plane.pids]
        async with await connect(plane.descriptor) as client:
            for number in range(100):
                await cycle(client, number)
            before = [resident(pid) for pid in pids]
            for number in range(1000):
                await cycle(client, number)
            after = [resident(pid) for pid in pids]
            assert (await client.stats()).bytes_used == 0
        for first, last in zip(before, after, strict=True):
            assert last <= first * 1.05, (before, after)

    with start_local_plane(TransferQueueConfig(capacity_mb=64, segment_mb=1)) as plane:
        asyncio.run(main(plane))
