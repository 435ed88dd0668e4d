"""The controller of a plane with a journal is killed, and clients continue with its successor."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from polling import until_async
from successor_helpers import START_S, numbers, restart

from rl_protocol import BatchData, ColumnSpec, ConfigError, ConflictError, PlaneLostError, WireError, dense
from rl_transferqueue import Client, LocalPlane, PutTimeout, TransferQueueConfig, connect, start_local_plane
from rl_transferqueue.wire.messages import Resume, Resumed
from rl_transferqueue.wire.process_liveness import this_process

COLUMNS = (1, 128, 66_000)
"""Of the rows of each writer; the last ones are too large for the memory that a client reserves."""
MOST = (1_000_000, 1_000_000, 60)
"""Rows of each writer at most: all large ones fit into memory."""


def config(folder: Path, *, far: bool = False) -> TransferQueueConfig:
    """`far`: clients use the network, as those of other hosts."""
    made = TransferQueueConfig(capacity_mb=64, segment_mb=1, durability="commit", journal_dir=str(folder / "journal"))
    return replace(made, listen="127.0.0.1", shared_memory=False) if far else made


def start(folder: Path, *, far: bool = False) -> LocalPlane:
    return start_local_plane(config(folder, far=far), start_timeout_s=START_S, successor_s=600.0)


@pytest.mark.parametrize("far", [False, True])
def test_a_client_continues_with_the_successor(tmp_path: Path, far: bool) -> None:
    async def main(plane: LocalPlane) -> None:
        async with await connect(plane.descriptor) as client:
            rows = await client.put("p", ["a", "b", "c"], numbers(1, 2, 3), tags=[{"n": 1}, {"n": 2}, {"n": 3}])
            view = await client.get(rows)
            draft = await client.alloc([ColumnSpec(name="x", kind="dense", dtype="int64")], 1)
            draft["x"][:] = 7
            assert (await client.claim("p", ["b"], task="t")).keys == ("b",)
            changes = await client.watch("p", timeout_s=60)
            waiting = asyncio.create_task(client.wait_ready("p", count=3, task="t", timeout_s=60))
            watching = asyncio.create_task(client.watch("p", since=changes.version, timeout_s=60))
            await asyncio.sleep(0)
            units = plane.pids[1:]
            await restart(plane)
            assert plane.pids[1:] == units
            found = await watching
            assert (found.reset, found.rows.keys, found.version > changes.version) == (True, ("a", "b", "c"), True)
            meta = await client.put("p", ["d"], draft, tags=[{"n": 4}])
            assert (await waiting).keys == ("a", "c", "d")
            assert meta.generations[0] > rows.generations[-1]
            assert (await client.get(meta)).dense("x").values.tolist() == [7]
            assert (await client.get(rows)).dense("x").values.tolist() == [1, 2, 3]
            await client.put("p", ["a"], numbers(100))
            assert view.dense("x").values.tolist() == [1, 2, 3]
            with pytest.raises(ConflictError):
                await client.claim("p", ["b"], task="t")
            async with await connect(plane.descriptor) as other:
                assert (await other.get(rows)).dense("x").values.tolist() == [100, 2, 3]

    with start(tmp_path, far=far) as plane:
        asyncio.run(main(plane))


@pytest.mark.parametrize("far", [False, True])
def test_a_successor_serves_with_the_units_that_are_left(tmp_path: Path, far: bool) -> None:
    async def main(plane: LocalPlane) -> None:
        async with await connect(plane.descriptor) as client:
            assert len(plane.descriptor.units) == 2
            for i in range(4):
                await client.put("p", [f"k{i}"], numbers(i))
            os.kill(plane.pids[1], signal.SIGKILL)

            async def one_is_left() -> bool:
                return (await client.stats()).bytes_capacity == plane.settings.unit_bytes

            await until_async(one_is_left, "the unit is lost")
            rows = await client.list_rows("p")
            assert (await client.get(rows, ["x"])).dense("x").values.tolist() == [0, 1, 2, 3]
            await restart(plane)
            rows = await client.put("p", ["k4"], numbers(4))
            assert (await client.get(rows)).dense("x").values.tolist() == [4]
            stats = await client.stats()
            assert (stats.lost, stats.bytes_capacity) == ({}, plane.settings.unit_bytes)
            async with await connect(plane.descriptor) as other:
                rows = await other.list_rows("p")
                assert (await other.get(rows, ["x"])).dense("x").values.tolist() == [0, 1, 2, 3, 4]

    with start(tmp_path, far=far) as plane:
        asyncio.run(main(plane))


class Load:
    """Clients that put, claim and count until they are told to stop."""

    def __init__(self) -> None:
        self.put: dict[str, int] = {}
        """Acknowledged rows."""
        self.claimed: list[str] = []
        self.increments = 0
        self.stop = False

    async def writer(self, client: Client, writer: int) -> None:
        """Puts new rows, with and without data."""
        for number in range(MOST[writer]):
            if self.stop:
                return
            key = f"w{writer}-{number}"
            data = BatchData({"x": dense(np.full((1, COLUMNS[writer]), number))}) if number % 4 else None
            await client.put("p", [key], data, tags=[{"n": number}], expect=[None])
            self.put[key] = number

    async def claimer(self, client: Client) -> None:
        """Takes each row once."""
        while True:
            rows = await client.wait_ready("p", count=1, task="t", timeout_s=60)
            self.claimed += rows.keys

    async def counter(self, client: Client) -> None:
        """Counts up with compare-and-set."""
        while not self.stop:
            n = (await client.list_rows("counter", keys=["n"])).tags[0]["n"]
            assert isinstance(n, int)
            try:
                await client.put("counter", ["n"], tags=[{"n": n + 1}], expect=[{"n": n}])
                self.increments += 1
            except ConflictError:
                continue


@pytest.mark.parametrize("far", [False, True])
def test_controllers_killed_under_load_lose_no_row_and_serve_none_twice(tmp_path: Path, far: bool) -> None:
    rng = random.Random(far)

    async def main(plane: LocalPlane) -> None:
        load = Load()
        clients = [await connect(plane.descriptor) for _ in range(3)]
        await clients[0].put("counter", ["n"], tags=[{"n": 0}])
        work = [load.writer(client, i) for i, client in enumerate(clients)]
        work += [load.counter(client) for client in clients]
        working = [asyncio.create_task(it) for it in work]
        claiming = [asyncio.create_task(load.claimer(client)) for client in clients[:2]]
        for _ in range(4):
            goal = len(load.put) + rng.randrange(20, 200), load.increments + rng.randrange(5, 30)

            async def reached(goal: tuple[int, int] = goal) -> bool:
                failed = [it for it in working if it.done() and it.exception()]
                return bool(failed) or (len(load.put) >= goal[0] and load.increments >= goal[1])

            await until_async(reached, "the load goes on")
            await restart(plane)
        load.stop = True
        await asyncio.gather(*working)
        await until_async(lambda: all_claimed(load), "all rows are claimed")
        for task in claiming:
            task.cancel()
        await asyncio.gather(*claiming, return_exceptions=True)
        assert Counter(load.claimed) == Counter(load.put.keys())
        assert (await clients[0].consumption_status("p", task="t")).flags.all()
        found = await clients[2].list_rows("p")
        assert {key: tag["n"] for key, tag in zip(found.keys, found.tags, strict=True)} == load.put
        whole = await clients[2].list_rows("p", fields=["x"])
        assert set(whole.keys) == {key for key, number in load.put.items() if number % 4}
        for key, number in rng.sample(sorted(load.put.items()), 20):
            if number % 4:
                row = await clients[2].list_rows("p", fields=["x"], keys=[key])
                (values,) = (await clients[2].get(row, ["x"])).dense("x").values.tolist()
                assert values == [number] * COLUMNS[int(key[1])]
        (tags,) = (await clients[2].list_rows("counter", keys=["n"])).tags
        assert tags["n"] == load.increments
        for client in clients:
            await client.close()

    with start(tmp_path, far=far) as plane:
        asyncio.run(main(plane))


async def all_claimed(load: Load) -> bool:
    return len(load.claimed) >= len(load.put)


CLAIMER = """
import asyncio, pathlib, sys
from rl_protocol import RLError
from rl_transferqueue import PlaneDescriptor, connect

async def main(descriptor, file, claims, count):
    async with await connect(PlaneDescriptor.from_json(descriptor), timeout_s=60) as client:
        with open(file, "a", buffering=1) as out:
            for _ in range(int(claims)):
                rows = await client.wait_ready("p", count=int(count), task="t", timeout_s=600)
                out.write(" ".join(rows.keys) + "\\n")
            while not pathlib.Path(file + ".go").exists():
                await asyncio.sleep(0.05)
            try:
                await client.list_rows("p")
            except RLError as error:
                out.write(f"{error}\\n")

asyncio.run(main(*sys.argv[1:]))
"""
"""Claims rows, and writes the keys of each claim to a line of a file."""


class Claimer:
    """A client in a process of its own."""

    def __init__(self, plane: LocalPlane, file: Path, *, claims: int = 1_000_000, count: int = 1) -> None:
        self.file = file
        arguments = (plane.descriptor.to_json(), str(file), str(claims), str(count))
        self.process = subprocess.Popen([sys.executable, "-c", CLAIMER, *arguments])

    @property
    def lines(self) -> list[list[str]]:
        """The keys of each claim so far."""
        return [line.split() for line in self.file.read_text().splitlines()] if self.file.exists() else []

    def end(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait(60)


@pytest.fixture
def claimers() -> Iterator[list[Claimer]]:
    started: list[Claimer] = []
    yield started
    for claimer in started:
        claimer.end()


@pytest.mark.parametrize("together", [True, False])
def test_rows_on_their_way_to_a_client_that_dies_with_its_controller_are_handed_out_again(
    tmp_path: Path, claimers: list[Claimer], together: bool
) -> None:
    """Its second claim says that it has the rows of the first; nothing says so of the second."""

    async def main(plane: LocalPlane) -> None:
        async with await connect(plane.descriptor) as client:
            await client.put("p", list("abcdef"), numbers(*range(6)))
            claimers.append(claimer := Claimer(plane, tmp_path / "claims", claims=2, count=2))
            await until_async(lambda: claims(claimer, 2), "both claims")
            assert claimer.lines == [["a", "b"], ["c", "d"]]
            if not together:
                claimer.end(signal.SIGSTOP)
            os.kill(plane.pids[0], signal.SIGKILL)
            if together:
                claimer.end()
            await restart(plane)
            if not together:
                assert (await client.list_rows("p", task="t")).keys == ("e", "f")
                claimer.end()
            found = await client.wait_ready("p", count=4, task="t", timeout_s=60)
            assert found.keys == ("c", "d", "e", "f")
            await restart(plane)
            assert (await client.consumption_status("p", task="t")).flags.all()

    with start(tmp_path) as plane:
        asyncio.run(main(plane))


async def claims(claimer: Claimer, count: int) -> bool:
    return len(claimer.lines) >= count


@pytest.mark.parametrize("far", [False, True])
def test_a_client_that_comes_back_too_late_is_refused(tmp_path: Path, claimers: list[Claimer], far: bool) -> None:
    async def main(plane: LocalPlane) -> None:
        async with await connect(plane.descriptor) as client:
            await client.put("p", ["a"], numbers(1))
        claimers.append(claimer := Claimer(plane, tmp_path / "claims", claims=1))
        await until_async(lambda: claims(claimer, 1), "the claim")
        claimer.end(signal.SIGSTOP)
        for _ in range(2):  # the second successor knows it, too
            await restart(plane)
            async with await connect(plane.descriptor) as client:
                found = await client.wait_ready("p", count=1, task="t", timeout_s=60)
                assert found.keys == ("a",)
                await client.reset_consumption("p")
        (tmp_path / "claims.go").touch()
        claimer.end(signal.SIGCONT)
        claimer.process.wait(60)
        assert "did not come back in time (start_local_plane(successor_s))" in claimer.file.read_text()

    with start_local_plane(config(tmp_path, far=far), start_timeout_s=START_S, successor_s=1.0) as plane:
        asyncio.run(main(plane))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_controllers_and_clients_killed_together_lose_no_row_and_serve_none_twice(
    tmp_path: Path, claimers: list[Claimer], seed: int
) -> None:
    """Only the last claim of a client that was killed may be handed out again."""
    rng, rows = random.Random(seed), 20_000
    keys = [f"k{number}" for number in range(rows)]

    async def main(plane: LocalPlane) -> None:
        client = await connect(plane.descriptor)
        await client.put("p", keys, numbers(*range(rows)))
        running = [Claimer(plane, tmp_path / f"claims{i}", count=rng.randint(1, 3)) for i in range(3)]
        killed: list[Claimer] = []
        claimers.extend(running)
        for number in range(4):
            goal = claimed(running) + rng.randrange(30, 300)
            await until_async(lambda goal=goal: reached(running, goal), "the claims go on")
            victim = running.pop(rng.randrange(3))
            ends = [victim.process.kill, lambda: os.kill(plane.pids[0], signal.SIGKILL)]
            for end in rng.sample(ends, 2):
                end()
            victim.end()
            killed.append(victim)
            await restart(plane)
            running.append(Claimer(plane, tmp_path / f"more{number}", count=rng.randint(1, 3)))
            claimers.append(running[-1])
        for claimer in running:
            claimer.end()
        killed += running
        await restart(plane)
        consumed = (await client.consumption_status("p", task="t")).flags.sum()
        rest = await client.wait_ready("p", count=rows - int(consumed), task="t", timeout_s=60)
        counts = Counter(rest.keys)
        for claimer in killed:
            counts.update(key for line in claimer.lines for key in line)
        last = {key for claimer in killed if claimer.lines for key in claimer.lines[-1]}
        assert set(counts) == set(keys), "rows were lost"
        assert {key for key, count in counts.items() if count > 1} <= last
        await client.close()

    with start(tmp_path) as plane:
        asyncio.run(main(plane))


def claimed(running: list[Claimer]) -> int:
    return sum(len(line) for claimer in running for line in claimer.lines)


async def reached(running: list[Claimer], goal: int) -> bool:
    return claimed(running) >= goal and all(claimer.lines for claimer in running)


def test_a_stopped_controller_is_ended_and_its_calls_are_served_by_the_successor(tmp_path: Path) -> None:
    async def main(plane: LocalPlane) -> None:
        async with await connect(plane.descriptor) as client:
            await client.put("p", ["a"], numbers(1), tags=[{"n": 1}])
            old = plane.pids[0]
            os.kill(old, signal.SIGSTOP)
            calls = [
                client.put("p", ["a"], tags=[{"n": 2}], expect=[{"n": 1}]),
                client.put("p", ["b"], numbers(2)),
                client.put("p", ["c"], BatchData({"x": dense(np.zeros((1, 1 << 18), np.int64))})),
                client.list_rows("p", keys=["a"]),
            ]
            running = [asyncio.create_task(call) for call in calls]
            await asyncio.sleep(0)
            await asyncio.to_thread(plane.restart_controller, start_timeout_s=START_S)
            with pytest.raises(ProcessLookupError):
                os.kill(old, 0)
            await asyncio.gather(*running)
            (tags,) = (await client.list_rows("p", keys=["a"])).tags
            assert tags["n"] == 2
            assert set((await client.list_rows("p")).keys) == {"a", "b", "c"}

    with start(tmp_path) as plane:
        asyncio.run(main(plane))


def test_the_outcome_of_a_put_is_known_to_the_successor(
    tmp_path: Path, server_grace_s: Callable[[float], None]
) -> None:
    """One put is made and its answer lost, one is never made; the row of the first is cleared."""
    server_grace_s(0.0)

    async def main(plane: LocalPlane) -> None:
        async with await connect(plane.descriptor) as client, await connect(plane.descriptor) as other:
            await client.put("q", ["r"], numbers(0))  # the client now has a reserve
            link = client._controller._link
            receive, link.receive = link.receive, list  # type: ignore[method-assign]
            with pytest.raises(PutTimeout) as made:
                await client.put("p", ["a"], tags=[{}], expect=[None], timeout_s=0.2)
            link.receive = receive  # type: ignore[method-assign]
            await until_async(lambda: has(other, "a"), "the put is made")
            await other.clear("p", ["a"])
            os.kill(plane.pids[0], signal.SIGSTOP)
            with pytest.raises(PutTimeout) as lost:
                await client.put("p", ["b"], numbers(1), expect=[None], timeout_s=0.05)
            await restart(plane)
            assert (await client.put("p", ["a"], tags=[{}], expect=[None], again=made.value)).generations == (2,)
            assert (await client.list_rows("p")).keys == ()
            assert (await client.put("p", ["b"], numbers(1), expect=[None], again=lost.value)).generations == (3,)

    with start(tmp_path) as plane:
        asyncio.run(main(plane))


async def has(client: Client, key: str) -> bool:
    return key in (await client.list_rows("p")).keys


@pytest.mark.parametrize("far", [False, True])
def test_another_incarnation_is_refused(tmp_path: Path, far: bool) -> None:
    async def main(plane: LocalPlane) -> None:
        async with await connect(plane.descriptor) as client:
            with pytest.raises(WireError, match=r"incarnation 1 .*asks for 2"):
                await client._controller.call(Resume(2, this_process(), "", ()), Resumed, 60)
            early = plane.descriptor
            await restart(plane)
            assert plane.descriptor.controller.incarnation == 2
            assert plane.descriptor.controller.address != early.controller.address
            async with await connect(early) as other:  # an old descriptor leads to the successor
                await other.put("p", ["a"], numbers(1))
            assert (await client.list_rows("p")).keys == ("a",)

    with start(tmp_path, far=far) as plane:
        asyncio.run(main(plane))


@pytest.mark.parametrize("far", [False, True])
def test_calls_fail_when_there_is_no_successor(tmp_path: Path, far: bool) -> None:
    async def main(plane: LocalPlane, match: str, end: Callable[[], None]) -> None:
        async with await connect(plane.descriptor) as client:
            waiting = asyncio.create_task(client.wait_ready("p", count=1, timeout_s=60))
            await asyncio.sleep(0)
            end()
            for call in (waiting, client.put("p", ["a"], numbers(1))):
                with pytest.raises(PlaneLostError, match=match):
                    await call

    with start_local_plane(config(tmp_path, far=far), successor_s=0.1) as plane:
        asyncio.run(main(plane, "no successor was there within 0.1 s", lambda: os.kill(plane.pids[0], signal.SIGKILL)))
    with start(tmp_path, far=far) as plane:
        asyncio.run(main(plane, "has ended", plane.close))
    with start(tmp_path, far=far) as plane:

        def abandon() -> None:
            os.kill(plane.pids[0], signal.SIGKILL)
            plane.abandon_controller()

        asyncio.run(main(plane, "has ended", abandon))
    with start_local_plane(config(tmp_path, far=far)) as plane:
        asyncio.run(main(plane, "has ended", lambda: os.kill(plane.pids[0], signal.SIGKILL)))
        with pytest.raises(ConfigError, match="successor_s"):
            plane.restart_controller()


def test_planes_whose_controller_can_have_no_successor_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"TransferQueueConfig\.durability"):
        start_local_plane(TransferQueueConfig(), successor_s=1.0)
    with pytest.raises(ConfigError, match="at least 0"):
        start_local_plane(config(tmp_path), successor_s=-1.0)
