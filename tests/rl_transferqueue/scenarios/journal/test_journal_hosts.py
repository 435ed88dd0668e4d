"""A plane with a journal and storage units on two hosts, which RL_HOST pretends on this machine.

Host `a` has the controller and the journal; units and controller are killed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import mmap
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from host_helpers import host_units, on_host, start_client
from polling import until_async

from rl_protocol import PlaneLostError, PlaneTimeout
from rl_protocol.support import host_identity
from rl_transferqueue import Client, LocalPlane, PlaneDescriptor, TransferQueueConfig, connect
from rl_transferqueue.launch.local_plane import start_local_plane
from rl_transferqueue.wire.messages import LinkBytes

START_S = 120.0
CONFIG = TransferQueueConfig(num_storage_units=1, capacity_mb=8, segment_mb=1, listen="127.0.0.2")
THERE = dataclasses.replace(CONFIG, listen="127.0.0.3")
NBYTES = 8 * (1 << 12) * 8
KEYS = [f"{i}" for i in range(8)]

PUT = """
    meta = await client.put("p", [f"{i}" for i in range(8)], rows(0, 8))
    got = await client.get(meta)
    say(got.dense("x").values[:, 5].tolist())
    await client.stats()
"""


@pytest.fixture(autouse=True)
def host_a(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RL_HOST", "a")
    host_identity.this_host.cache_clear()
    yield
    host_identity.this_host.cache_clear()


def start(folder: Path, *, successor_s: float = 0.0, **settings: object) -> LocalPlane:
    config = dataclasses.replace(CONFIG, durability="commit", journal_dir=str(folder / "journal"), **settings)
    return start_local_plane(config, hosts=2, start_timeout_s=START_S, successor_s=successor_s)


def kill(pids: Sequence[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


async def values(client: Client, keys: Sequence[str] = KEYS) -> list[int]:
    """A value of each row."""
    meta = await client.list_rows("p", fields=["x"], keys=keys)
    return (await client.get(meta, timeout_s=60)).dense("x").values[:, 5].tolist()


async def links(client: Client) -> LinkBytes:
    return LinkBytes(**(await client.stats()).links)


async def capacity(client: Client, nbytes: int) -> bool:
    return (await client.stats()).bytes_capacity == nbytes


def test_rows_of_another_host_stay_there_and_are_in_the_journal(tmp_path: Path) -> None:
    """The processes of both hosts are killed; the next plane has all rows."""
    with start(tmp_path) as plane, host_units("b", THERE) as (units, pids):
        plane.join(units)
        assert on_host("b", plane.descriptor, PUT) == f"{[*range(8)]}\n"

        async def moved() -> LinkBytes:
            async with await connect(plane.descriptor) as client:
                return await links(client)

        assert asyncio.run(moved()) == LinkBytes(shared_memory=2 * NBYTES)
        kill([*pids, *plane.pids])

    async def again(descriptor: PlaneDescriptor) -> None:
        async with await connect(descriptor) as client:
            assert await values(client) == [*range(8)]

    with start(tmp_path) as plane:
        assert plane.recovery is not None
        assert plane.recovery.rows_kept == 8
        asyncio.run(again(plane.descriptor))


def flip(pid: int, value: int) -> None:
    """Change a byte of a row in the arena of a storage unit."""
    row, flipped = np.full(1 << 12, value, np.int64).tobytes(), 0
    for file in Path(f"/proc/{pid}/fd").iterdir():
        if not file.is_symlink() or "memfd:" not in str(file.readlink()):
            continue
        with file.open("r+b") as arena, mmap.mmap(arena.fileno(), 0) as memory:
            place = memory.find(row)
            if place >= 0:
                memory[place + 5 * 8] ^= 0x10
                flipped += 1
    assert flipped == 1


@pytest.mark.parametrize("verify", [True, False])
def test_rows_that_are_damaged_in_memory_of_another_host_come_from_the_journal(tmp_path: Path, verify: bool) -> None:
    """Row 3 is damaged, and the rows of its put are on the disk alone from then on."""
    with start(tmp_path, verify=verify) as plane, host_units("b", THERE) as (units, pids):
        plane.join(units)
        on_host("b", plane.descriptor, PUT)

        async def main() -> None:
            async with await connect(plane.descriptor) as client:
                assert await values(client, ["2"]) == [2]
                flip(pids[0], 3)
                assert await values(client) == [0, 1, 2, 3 if verify else 3 ^ 0x10, 4, 5, 6, 7]
                assert (await client.stats()).damaged == verify
                hosts = await client.row_hosts("p", ["3"])
                assert [host.rpartition("/")[2] for host in hosts.hosts] == ["a", "b"]
                assert hosts.nbytes[0].tolist() == [verify * NBYTES // 8, (not verify) * NBYTES // 8]

        asyncio.run(main())


def test_a_read_that_waits_for_the_unit_of_a_host_that_is_lost_ends(tmp_path: Path) -> None:
    """The unit is stopped, so it does not compare its rows, and is then killed."""
    with start(tmp_path, verify=True) as plane, host_units("b", THERE) as (units, pids):
        plane.join(units)
        on_host("b", plane.descriptor, PUT)

        async def main() -> None:
            async with await connect(plane.descriptor) as client:
                os.kill(pids[0], signal.SIGSTOP)
                meta = await client.list_rows("p", fields=["x"])
                with pytest.raises(PlaneTimeout, match=r"units \[1\] of other hosts did not compare rows of partition"):
                    await client.get(meta, timeout_s=0.2)
                reading = asyncio.create_task(values(client))
                await asyncio.sleep(0)
                kill(pids)
                assert await reading == [*range(8)]

        asyncio.run(main())


def test_rows_of_a_host_that_is_lost_come_from_the_journal(tmp_path: Path) -> None:
    with start(tmp_path) as plane, host_units("b", THERE) as (units, pids):
        plane.join(units)
        on_host("b", plane.descriptor, PUT)

        async def lose() -> None:
            async with await connect(plane.descriptor) as client:
                assert await values(client) == [*range(8)]
                kill(pids)
                await until_async(lambda: capacity(client, CONFIG.unit_bytes), "the unit is lost")
                assert await values(client) == [*range(8)]
                assert (await client.stats()).lost == {}

        asyncio.run(lose())


@pytest.mark.parametrize("verify", [False, True])
def test_a_successor_serves_the_units_of_both_hosts(tmp_path: Path, verify: bool) -> None:
    body = """
        await client.put("p", ["0", "1"], rows(0, 2))
        say("put")
        sys.stdin.readline()
        await client.put("p", ["2", "3"], rows(2, 2), timeout_s=120)
        meta = await client.list_rows("p", fields=["x"])
        say((await client.get(meta, timeout_s=60)).dense("x").values[:, 5].tolist())
        say(client._descriptor.controller.incarnation)
        found = await client.row_hosts("p", ["2"])
        say({host.rpartition("/")[2]: n for host, n in zip(found.hosts, found.nbytes[0].tolist())})
    """
    with start(tmp_path, successor_s=600.0, verify=verify) as plane, host_units("b", THERE) as (units, _):
        plane.join(units)
        client = start_client("b", plane.descriptor, body)
        assert client.stdout is not None
        assert client.stdout.readline() == "put\n"
        kill(plane.pids[:1])
        assert plane.restart_controller(start_timeout_s=START_S).rows_kept == 2
        out, err = client.communicate("go on\n", timeout=120)
        assert client.returncode == 0, err
        assert out.splitlines() == ["[0, 1, 2, 3]", "2", str({"a": 0, "b": (1 << 12) * 8})]


def test_a_successor_does_without_units_that_have_ended(tmp_path: Path) -> None:
    with start(tmp_path, successor_s=600.0) as plane, host_units("b", THERE) as (units, pids):
        plane.join(units)
        on_host("b", plane.descriptor, PUT)

        async def main() -> None:
            async with await connect(plane.descriptor) as client:
                kill([*pids, plane.pids[0]])
                await asyncio.to_thread(plane.restart_controller, start_timeout_s=START_S)
                assert await values(client) == [*range(8)]
                assert (await client.stats()).bytes_capacity == CONFIG.unit_bytes

        asyncio.run(main())


def test_without_units_on_the_controllers_host_rows_of_the_journal_can_not_be_read(tmp_path: Path) -> None:
    """Rows in the units of another host still can."""
    with start(tmp_path) as plane, host_units("b", THERE) as (units, _):
        plane.join(units)
        on_host("b", plane.descriptor, PUT)

        async def main() -> None:
            async with await connect(plane.descriptor) as client:
                await client.unload("p", ["7"])
                kill(plane.pids[1:])
                await until_async(lambda: capacity(client, CONFIG.unit_bytes), "the unit is lost")
                assert await values(client, ["0", "3"]) == [0, 3]
                with pytest.raises(PlaneLostError, match=r"units on the host of the controller"):
                    await values(client, ["7"])

        asyncio.run(main())


def test_a_full_host_makes_room_for_rows_of_the_journal_in_its_own_units(tmp_path: Path) -> None:
    """Rows of 4 MiB: host `a` holds two of them, and reads six, one after the other."""
    body = """
        for i in range(6):
            await client.put("p", [f"{i}"], rows(i, 1, 1 << 19))
            await client.unload("p", [f"{i}"])
        for i in range(6, 8):
            await client.put("p", [f"{i}"], rows(i, 1, 1 << 18))
    """
    with start(tmp_path) as plane, host_units("b", THERE) as (units, _):
        plane.join(units)
        on_host("b", plane.descriptor, body)

        async def main() -> None:
            async with await connect(plane.descriptor) as client:
                for i in range(6):
                    assert await values(client, [f"{i}"]) == [i]
                there = await client.row_hosts("p", ["6", "7"])
                here = [host.endswith("/a") for host in there.hosts].index(True)
                assert there.nbytes[:, here].tolist() == [0, 0]

        asyncio.run(main())


def test_units_of_a_host_killed_while_it_puts_lose_no_acknowledged_row(tmp_path: Path) -> None:
    """Puts go on in the units of the other host; the next plane has each that was acknowledged."""
    body = """
        for i in range(60):
            await client.put("p", [f"{i}"], rows(i, 1, 1 << 15), timeout_s=60)
            say(i)
    """
    acknowledged = list[str]()
    with start(tmp_path) as plane, host_units("b", THERE) as (units, pids):
        plane.join(units)
        client = start_client("b", plane.descriptor, body)
        assert client.stdout is not None
        for line in client.stdout:
            acknowledged.append(line.strip())
            if len(acknowledged) == 10:
                kill(pids)
            if len(acknowledged) == 40:
                kill(plane.pids)
        client.communicate(timeout=120)
    assert len(acknowledged) >= 40

    async def check(descriptor: PlaneDescriptor) -> None:
        async with await connect(descriptor) as client:
            assert [await values(client, [key]) for key in acknowledged] == [[int(key)] for key in acknowledged]

    with start(tmp_path) as plane:
        asyncio.run(check(plane.descriptor))
