"""A plane with storage units on two hosts, which RL_HOST pretends on this machine.

Host `a` has the controller, host `b` is another one: each has its own loopback address.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest
from host_helpers import host_units, on_host, start_client
from polling import until_async

from rl_protocol import BatchData, BatchError, ConfigError, DataPlaneError, dense
from rl_protocol.support import host_identity
from rl_protocol.support.heartbeat import read_beat
from rl_transferqueue import Client, LocalPlane, PlaneDescriptor, TransferQueueConfig, connect, start_host_units
from rl_transferqueue.launch.local_plane import start_local_plane
from rl_transferqueue.wire.messages import LinkBytes

CONFIG = TransferQueueConfig(num_storage_units=2, capacity_mb=8, segment_mb=1, listen="127.0.0.2")
THERE = dataclasses.replace(CONFIG, listen="127.0.0.3")
ROWS = 8
NBYTES = ROWS * (1 << 12) * 8


@pytest.fixture(autouse=True)
def host_a(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RL_HOST", "a")
    host_identity.this_host.cache_clear()
    yield
    host_identity.this_host.cache_clear()


@pytest.fixture
def plane(host_a: None) -> Iterator[LocalPlane]:
    with start_local_plane(CONFIG, hosts=2) as plane, host_units("b", THERE) as (units, _):
        plane.join(units)
        yield plane


PUT = """
    meta = await client.put("p", [f"{i}" for i in range(8)], rows(0, 8))
    await client.get(meta)
    await client.stats()
"""


async def links(descriptor: PlaneDescriptor) -> LinkBytes:
    async with await connect(descriptor) as client:
        return LinkBytes(**(await client.stats()).links)


async def alone(client: Client) -> bool:
    return (await client.metrics()).sessions == 1


async def empty(client: Client) -> bool:
    stats = await client.stats()
    return stats.bytes_used + stats.bytes_reserved == 0


async def lost(client: Client) -> bool:
    return (await client.stats()).lost == {"p": ("there",)}


@pytest.mark.parametrize("host", ["a", "b"])
def test_rows_put_and_got_on_one_host_cross_no_network_link(plane: LocalPlane, host: str) -> None:
    on_host(host, plane.descriptor, PUT)
    moved = asyncio.run(links(plane.descriptor))
    assert moved == LinkBytes(shared_memory=2 * NBYTES)


def test_rows_of_another_host_are_got_over_tcp_alone_and_beside_own_ones(plane: LocalPlane) -> None:
    on_host("b", plane.descriptor, PUT)
    got = """
        await client.put("p", ["8", "9"], rows(8, 2))
        meta = await client.list_rows("p", fields=["x"], keys=["9", "3", "8", "0"])
        say((await client.get(meta)).dense("x").values[:, 5].tolist())
        alone = await client.list_rows("p", fields=["x"], keys=["7", "6"])
        say((await client.get(alone)).dense("x").values[:, 5].tolist())
        await client.stats()
    """
    assert on_host("a", plane.descriptor, got).splitlines() == ["[9, 3, 8, 0]", "[7, 6]"]
    row = NBYTES // ROWS
    moved = asyncio.run(links(plane.descriptor))
    assert moved == LinkBytes(shared_memory=(2 * ROWS + 2 + 2) * row, loopback=(2 + 2) * row)


def test_the_controller_says_how_many_bytes_of_each_row_are_on_which_host(plane: LocalPlane) -> None:
    """Of row 3 a column is on the other host."""
    on_host("b", plane.descriptor, PUT)

    async def ask() -> None:
        async with await connect(plane.descriptor) as client:
            await client.put("p", ["3"], BatchData({"y": dense(np.ones((1, 64), np.int64))}))
            await client.put("p", ["here"], BatchData({"y": dense(np.ones((1, 128), np.int64))}))
            found = await client.row_hosts("p", ["here", "3", "0"])
            here = [host.endswith("/a") for host in found.hosts]
            assert sorted(here) == [False, True]
            by_host = found.nbytes[:, np.argsort(here)[::-1]]  # this host first
            assert by_host.tolist() == [[128 * 8, 0], [64 * 8, NBYTES // ROWS], [0, NBYTES // ROWS]]

    asyncio.run(ask())


def test_a_full_host_puts_into_units_of_another(plane: LocalPlane) -> None:
    """Its two units hold 8 blocks of 1 MiB."""
    body = """
        for i in range(10):
            await client.put("p", [f"{i}-{j}" for j in range(8)], rows(8 * i, 8, 1 << 14))
        say((await client.get(await client.list_rows("p", fields=["x"]))).dense("x").values[:, 0].sum())
        await client.stats()
    """
    assert on_host("b", plane.descriptor, body) == f"{sum(range(80))}\n"
    moved = asyncio.run(links(plane.descriptor))
    block = 8 * (1 << 14) * 8
    assert moved == LinkBytes(shared_memory=2 * 8 * block, loopback=2 * 2 * block)


def test_the_end_of_a_unit_of_another_host_loses_its_rows_and_no_others() -> None:
    body = """
        await client.put("p", ["there"], rows(0, 1))
        await client.stats()
    """
    with start_local_plane(CONFIG, hosts=2) as plane, host_units("b", THERE) as (units, pids):
        plane.join(units)
        on_host("b", plane.descriptor, body)

        async def lose() -> None:
            async with await connect(plane.descriptor) as client:
                await client.put("p", ["here"], (await client.get(await client.list_rows("p", fields=["x"]))))
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
                await until_async(lambda: lost(client), "the row of that host is lost")
                here = await client.list_rows("p", fields=["x"])
                assert here.keys == ("here",)
                assert (await client.get(here)).dense("x").values[0, 5] == 0

        asyncio.run(lose())


def test_a_client_that_connects_does_without_units_that_do_not_answer() -> None:
    """As those of a host that is lost."""
    with start_local_plane(CONFIG, hosts=2) as plane, host_units("b", THERE) as (units, pids):
        plane.join(units)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)

        async def use() -> None:
            async with await connect(plane.descriptor, timeout_s=8) as client:
                meta = await client.put("p", ["x"], BatchData({"x": dense([7.0])}))
                assert (await client.get(meta)).dense("x").values.tolist() == [7.0]

        try:
            asyncio.run(use())
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)


def test_memory_of_a_client_that_the_controller_lost_stays_until_its_process_ends() -> None:
    """The client's connections end, as if the link to its host was cut, and its process lives: it
    could still write to what it has reserved, and read what it has leased, in shared memory.
    """
    body = """
        meta = await client.put("p", ["a"], rows(7, 1))
        held = await client.get(meta)
        client._servers.close()
        say("cut")
        sys.stdin.readline()
        say(int(held.dense("x").values[0, 5]))
    """
    with start_local_plane(CONFIG, hosts=2) as plane, host_units("b", THERE) as (units, _):
        plane.join(units)
        holder = start_client("b", plane.descriptor, body)
        assert holder.stdout is not None
        assert holder.stdout.readline() == "cut\n"

        async def clear() -> None:
            async with await connect(plane.descriptor) as client:
                await until_async(lambda: alone(client), "the session of the other client ends")
                assert await client.clear("p") == 1
                before = await client.stats()
                assert before.bytes_used > 0
                assert before.bytes_reserved > 0
                out, _ = holder.communicate("go on\n", timeout=60)
                assert out == "7\n"
                await until_async(lambda: empty(client), "its memory is free")

        asyncio.run(clear())


def test_units_that_a_plane_does_not_take_are_refused() -> None:
    with (
        host_units("b", THERE) as (units, _),
        start_local_plane(CONFIG) as plane,
        pytest.raises(BatchError, match="takes 2 storage units"),
    ):
        plane.join(units)
    larger = dataclasses.replace(THERE, capacity_mb=16)
    with (
        host_units("b", larger) as (units, _),
        start_local_plane(CONFIG, hosts=2) as plane,
        pytest.raises(BatchError, match="takes 4 storage units of 4194304 bytes; got another one, of 8388608"),
    ):
        plane.join(units)
    alone = dataclasses.replace(CONFIG, listen="")
    with (
        host_units("b", THERE) as (units, _),
        start_local_plane(alone, hosts=2) as plane,
        pytest.raises(BatchError, match=r"TransferQueueConfig\.listen"),
    ):
        plane.join(units)


def test_a_unit_that_has_ended_is_named() -> None:
    with host_units("b", THERE) as (units, _):
        pass
    with start_local_plane(CONFIG, hosts=2) as plane, pytest.raises(DataPlaneError, match="storage unit 2"):
        plane.join(units)


def test_units_need_an_address_and_the_simple_backend() -> None:
    with pytest.raises(ConfigError, match=r"TransferQueueConfig\.listen"):
        start_host_units(dataclasses.replace(CONFIG, listen=""))
    with pytest.raises(ConfigError, match=r"TransferQueueConfig\.backend"):
        start_host_units(dataclasses.replace(CONFIG, backend="memory"))


def test_each_unit_of_a_host_has_a_heartbeat() -> None:
    with start_host_units(THERE) as units:
        pids, files = zip(*units.heartbeats.items(), strict=True)
        assert pids == units.pids
        assert None not in map(read_beat, files)
    assert set(map(read_beat, files)) == {None}


def test_a_mark_divides_one_machine_into_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    here = host_identity.this_host.__wrapped__  # not cached
    monkeypatch.delenv(host_identity.MARK)
    machine = here()
    names = [machine]
    for mark in ("a", "b"):
        monkeypatch.setenv(host_identity.MARK, mark)
        names.append(here())
    assert names == [machine, f"{machine}/a", f"{machine}/b"]
