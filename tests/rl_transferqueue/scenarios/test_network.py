"""A plane without shared memory: bytes over TCP, killed processes, and malformed data."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from network_helpers import MIB, NO_KEY, SMALL, call_on, other_client, rows_of, served

from rl_protocol import BatchData, CapacityTimeout, ConfigError, PlaneLostError, PlaneTimeout, RLError, dense, ragged
from rl_protocol.errors import WireError
from rl_protocol.support.host.portable import uses_linux
from rl_protocol.wire import plan
from rl_transferqueue import Client, LocalPlane, TransferQueueConfig, check_plane, connect, start_local_plane
from rl_transferqueue.client.other_host_memory import RemoteMemory
from rl_transferqueue.memory.receive_pool import ReceivePool
from rl_transferqueue.transport.addresses import endpoint, split_endpoint
from rl_transferqueue.transport.bulk_protocol import MAGIC, ReadRows, Sending, WantedPiece, WriteBlock, Written, frame
from rl_transferqueue.transport.connection_limits import Limits
from rl_transferqueue.transport.control_client import ControlClient
from rl_transferqueue.transport.plane_secret import load_key
from rl_transferqueue.transport.zmq_link import ZmqLink
from rl_transferqueue.wire.messages import Abandon, Done, Hello, Reserve, Reserved
from rl_transferqueue.wire.spans import most_spare


@pytest.fixture(scope="module")
def plane() -> Iterator[LocalPlane]:
    with start_local_plane(SMALL) as plane:
        yield plane


RESERVE = 2 * most_spare(8 * MIB)
"""The memory that clients may reserve ahead of need in a plane of 8 MiB."""


async def settles(client: Client, nbytes: int, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        stats = await client.stats()
        if stats.bytes_used == nbytes and stats.bytes_reserved <= RESERVE:
            return
        assert time.monotonic() < deadline, f"{stats}, not {nbytes} bytes used"
        await asyncio.sleep(0.02)


# --------------------------------------------------------------------------------
# Shared memory or TCP
def test_without_shared_memory_a_client_maps_none(plane: LocalPlane) -> None:
    done = other_client(plane.descriptor)
    assert (done.stdout, done.returncode) == ("False\n", 0), done.stderr


def test_with_it_the_same_client_does() -> None:
    with start_local_plane(TransferQueueConfig(capacity_mb=8, segment_mb=1, listen="127.0.0.1")) as plane:
        done = other_client(plane.descriptor)
        assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr


@pytest.mark.skipif(not uses_linux(), reason="pid namespaces are Linux's")
def test_a_client_in_another_pid_namespace_takes_the_network_by_itself() -> None:
    apart = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("unshare --pid is not permitted here")
    with start_local_plane(TransferQueueConfig(capacity_mb=8, segment_mb=1, listen="127.0.0.1")) as plane:
        done = other_client(plane.descriptor, *apart)
        assert (done.stdout, done.returncode) == ("False\n", 0), done.stderr
    with start_local_plane(TransferQueueConfig(capacity_mb=8, segment_mb=1)) as plane:
        done = other_client(plane.descriptor, *apart)
        assert "set TransferQueueConfig.listen" in done.stderr


def test_with_a_port_the_plane_listens_there_and_at_those_after_it() -> None:
    """The test uses a separate address, and tries other ports if a program uses these."""
    settings = {"num_storage_units": 2, "capacity_mb": 8, "segment_mb": 1, "shared_memory": False}
    for first in range(21_000, 22_000, 50):
        config = TransferQueueConfig(listen=f"127.0.0.73:{first}", **settings)
        with contextlib.suppress(ConfigError):  # used by a program that listens on all addresses, or by this test
            check_plane(config)
            started = start_local_plane(config)
            break
    with started as plane:
        controller, units = plane.descriptor.controller, plane.descriptor.units
        assert controller.control == f"tcp://127.0.0.73:{first}"
        assert [controller.bulk, *(unit.bulk for unit in units)] == [f"127.0.0.73:{first + i}" for i in (1, 2, 3)]
        assert other_client(plane.descriptor).stdout == "False\n"
        with pytest.raises(ConfigError, match="Address already in use"):
            start_local_plane(config)


def test_an_ipv6_address_will_do() -> None:
    assert split_endpoint(endpoint("::1", 5)) == ("::1", 5)
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    with start_local_plane(
        TransferQueueConfig(capacity_mb=8, segment_mb=1, listen="::1", shared_memory=False)
    ) as plane:
        assert other_client(plane.descriptor).stdout == "False\n"


def test_a_get_moves_only_what_was_asked_for(plane: LocalPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row, a column and scattered rows of a block each transfer only their own bytes."""
    received: list[int] = []
    take = ReceivePool.take

    def counted(buffers: ReceivePool, nbytes: int) -> memoryview:
        received.append(nbytes)
        return take(buffers, nbytes)

    monkeypatch.setattr(ReceivePool, "take", counted)

    async def main() -> None:
        async with await connect(plane.descriptor) as client:
            data = BatchData(
                {
                    "wide": dense(np.arange(64 * 4096, dtype=np.float32).reshape(64, 4096)),
                    "r": ragged([np.arange(i) for i in range(64)], "int64"),
                }
            )
            meta = await client.put("p", [f"k{i}" for i in range(64)], data)
            for rows, fields in (([5], ["wide"]), (range(64), ["r"]), ([60, 3, 17], ["wide", "r"])):
                got = await client.get(meta.select_rows(rows), fields)
                want = data.select_rows(rows).select_fields(fields)
                assert got.field_names == want.field_names
                for name in fields:
                    for mine, theirs in zip(got[name].buffers, want[name].buffers, strict=True):
                        assert mine.tobytes() == theirs.tobytes()
                        assert not mine.flags.writeable
                assert want.nbytes <= received.pop() < want.nbytes + 1024
                assert not received
            await client.clear("p")
            assert (await client.stats()).bytes_used == 0

    asyncio.run(main())


# --------------------------------------------------------------------------------
# Killed processes
@pytest.mark.parametrize("victim", [0, 1], ids=["controller", "unit"])
def test_every_call_says_that_the_plane_is_lost(victim: int) -> None:
    """The client notices that the unit has ended, or the controller reports that all have."""

    async def main(plane: LocalPlane) -> None:
        client = await connect(plane.descriptor)
        meta = await client.put("p", ["a"], rows_of(1, MIB))
        view = await client.get(meta)
        calls = [
            asyncio.ensure_future(client.wait_ready("p", count=2, timeout_s=60)),
            asyncio.ensure_future(client.put("p", ["full"], rows_of(1, 8 * MIB), timeout_s=60)),
        ]
        await asyncio.sleep(0.05)
        began = time.monotonic()
        os.kill(plane.pids[victim], signal.SIGKILL)
        for call in calls:
            with pytest.raises(PlaneLostError, match=["controller", "storage unit"][victim]):
                await call
        for again in (client.get(meta), client.put("p", ["b"], rows_of(1, 1)), client.list_rows("p"), client.stats()):
            with pytest.raises(PlaneLostError):
                await again
        assert view.dense("x").values.all()
        await client.close()
        with pytest.raises(PlaneLostError):
            await connect(plane.descriptor)
        assert time.monotonic() - began < 60

    with start_local_plane(SMALL) as plane:
        asyncio.run(main(plane))


@pytest.mark.parametrize("what", ["put", "get"])
def test_a_unit_that_dies_in_the_middle_of_a_transfer(what: str) -> None:
    """The unit is stopped first, so that the transfer can't finish before it is killed."""

    async def main(plane: LocalPlane) -> None:
        client = await connect(plane.descriptor)
        meta = await client.put("p", ["a"], rows_of(1, 32 * MIB))
        unit = plane.pids[1]
        call = asyncio.ensure_future(
            client.put("p", ["b"], rows_of(2, 32 * MIB)) if what == "put" else client.get(meta, timeout_s=60)
        )
        # There is no event for the moment when a thread begins to send.
        while not _bulk_calls(client) and not call.done():  # noqa: ASYNC110
            await asyncio.sleep(0)
        os.kill(unit, signal.SIGSTOP)
        await asyncio.sleep(0.3)
        if call.done():
            pytest.skip("the transfer was over before the unit could be stopped")
        os.kill(unit, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(PlaneLostError):
            await call
        assert time.monotonic() - began < 60
        await client.close()

    with start_local_plane(
        TransferQueueConfig(num_storage_units=1, capacity_mb=128, listen="127.0.0.2", shared_memory=False)
    ) as plane:
        asyncio.run(main(plane))


def _bulk_calls(client: Client) -> int:
    assert isinstance(client._memory, RemoteMemory)
    return sum(transfer._connection is not None for transfer in client._memory._transfers)


def test_a_stopped_unit_is_a_timeout_and_later_calls_work() -> None:
    async def main(plane: LocalPlane) -> None:
        async with await connect(plane.descriptor) as client:
            meta = await client.put("p", ["a"], rows_of(1, MIB))
            os.kill(plane.pids[1], signal.SIGSTOP)
            for call in (client.get(meta, timeout_s=0.2), client.put("p", ["b"], rows_of(1, MIB), timeout_s=0.2)):
                began = time.monotonic()
                with pytest.raises(PlaneTimeout):
                    await call
                assert time.monotonic() - began < 60
            with pytest.raises(PlaneTimeout):
                await connect(plane.descriptor, timeout_s=0.2)
            os.kill(plane.pids[1], signal.SIGCONT)
            assert (await client.get(meta)).dense("x").values.all()
            await settles(client, MIB)

    with start_local_plane(SMALL) as plane:
        asyncio.run(main(plane))


DYING_CLIENT = """
import asyncio, sys
import numpy as np
from rl_protocol import BatchData, dense
from rl_transferqueue import PlaneDescriptor, connect

async def main():
    client = await connect(PlaneDescriptor.from_json(sys.argv[1]))
    meta = await client.put("p", ["committed"], BatchData({"x": dense(np.full((1, 1 << 20), 7, np.uint8))}))
    await client.get(meta)
    asyncio.ensure_future(client.wait_ready("p", count=2, task="t", timeout_s=60))
    for i in range(9):
        asyncio.ensure_future(client.put("q", [f"waits{i}"], BatchData({"x": dense(np.zeros((1, 1 << 20), np.uint8))})))
    await client.wait_ready("q", count=7, timeout_s=60)
    print("up", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_a_killed_client_leaves_what_it_committed_and_nothing_else() -> None:
    async def main(plane: LocalPlane, dying: subprocess.Popen[bytes]) -> None:
        async with await connect(plane.descriptor) as client:
            with pytest.raises(CapacityTimeout):
                await client.put("p", ["full"], rows_of(1, MIB), timeout_s=0.1)
            dying.kill()
            dying.wait()
            assert await client.clear("q") == 7
            await settles(client, MIB)
            meta = await client.list_rows("p")
            assert (await client.get(meta)).dense("x").values.min() == 7
            await client.put("p", ["more"], rows_of(1, 1))
            assert (await client.wait_ready("p", count=2, task="t", timeout_s=60)).keys == ("committed", "more")
            await client.clear("p")
            await settles(client, 0)

    with start_local_plane(SMALL) as plane:
        command = [sys.executable, "-c", DYING_CLIENT, plane.descriptor.to_json()]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as dying:
            assert dying.stdout is not None
            assert dying.stdout.readline() == b"up\n"
            asyncio.run(main(plane, dying))


def test_bytes_that_arrive_after_their_block_was_reclaimed_change_nothing(plane: LocalPlane) -> None:
    """A client ends in the middle of a payload; the rest arrives after another got the memory."""

    async def main() -> None:
        session = b"\x03" + os.urandom(7)
        loop = asyncio.get_running_loop()
        controller = plane.descriptor.controller
        lifeline = call_on(plane, controller, session)
        control = ControlClient(loop, ZmqLink(controller.control, session, load_key()), "controller")
        await control.call(Hello(None), Done, 60)
        span = (await control.call(Reserve(6 * MIB, 0), Reserved, 60)).span
        bulk = call_on(plane, plane.descriptor.units[0], session)
        bulk.send([frame(WriteBlock(span.offset, 6 * MIB, 0)), memoryview(bytes([66]) * MIB)])
        async with await connect(plane.descriptor) as other:
            await asyncio.sleep(0.1)  # let the first part arrive
            lifeline.close()
            await settles(other, 0)
            meta = await other.put("p", ["a"], rows_of(1, 6 * MIB))
            bulk.until(time.monotonic() + 60)
            with pytest.raises(PlaneLostError):
                bulk.send([memoryview(bytes([66]) * (5 * MIB))])
            assert (await other.get(meta)).dense("x").values.max() == 1
            await other.clear("p")
            with pytest.raises(ConfigError):
                call_on(plane, plane.descriptor.units[0], session)
        for end in (bulk, control):
            end.close()

    asyncio.run(main())


def test_cancelled_puts_and_gets_leave_nothing_behind(plane: LocalPlane) -> None:
    async def main() -> None:
        async with await connect(plane.descriptor) as client, await connect(plane.descriptor) as other:
            meta = await client.put("p", ["a"], rows_of(1, MIB))
            for delay in np.linspace(0, 0.012, 25):
                tasks = [
                    asyncio.ensure_future(client.put("q", ["b"], rows_of(2, 3 * MIB))),
                    asyncio.ensure_future(client.get(meta)),
                ]
                await asyncio.sleep(float(delay))
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                assert (await other.get(meta)).dense("x").values.max() == 1
            await client.clear("q")
            await settles(client, MIB)
            await client.clear("p")

    asyncio.run(main())


def test_closing_a_client_ends_its_calls(plane: LocalPlane) -> None:
    async def main() -> None:
        client = await connect(plane.descriptor)
        meta = await client.put("p", ["a"], rows_of(1, MIB))
        os.kill(plane.pids[1], signal.SIGSTOP)
        call = asyncio.ensure_future(client.get(meta))
        await asyncio.sleep(0.1)
        began = time.monotonic()
        await client.close()
        with pytest.raises(PlaneLostError):
            await call
        assert time.monotonic() - began < 60
        os.kill(plane.pids[1], signal.SIGCONT)
        async with await connect(plane.descriptor) as other:
            await other.clear("p")
            await settles(other, 0)

    asyncio.run(main())


# --------------------------------------------------------------------------------
# Malformed data
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(said=st.binary(max_size=200))
def test_bytes_without_meaning_end_their_own_connection(plane: LocalPlane, said: bytes) -> None:
    for server in (plane.descriptor.controller, plane.descriptor.units[0]):
        with socket.create_connection(split_endpoint(server.bulk), timeout=60) as stranger:
            stranger.sendall(said)
            assert stranger.recv(4) == MAGIC
        session = b"\x04" + os.urandom(7)
        friend = call_on(plane, server, session)
        friend.send([len(said).to_bytes(4, "little"), said])
        with pytest.raises((PlaneLostError, WireError)):
            friend.receive_bytes(1)
        friend.close()


def test_requests_that_make_no_sense_are_answered(plane: LocalPlane) -> None:
    unit = call_on(plane, plane.descriptor.units[0], b"\x05" + os.urandom(7))
    header = msgspec.msgpack.encode(plan(rows_of(1, 100)))
    huge = msgspec.msgpack.encode([1 << 40, 1 << 40, [["x", "dense", "uint8", [100], [[0, 100 << 40]]]]])
    for piece, headers in (
        (WantedPiece(0, 1, ("x",), (0, 1)), (header,)),
        (WantedPiece(0, 0, ("x",), (0, 1)), (b"",)),
        (WantedPiece(0, 0, ("x",), (0, 1)), (huge,)),
        (WantedPiece(1 << 60, 0, ("x",), (0, 1)), (header,)),
        (WantedPiece(0, 0, ("x",), (0, 9)), (header,)),
        (WantedPiece(0, 0, ("x",), (0, 1 << 62)), (header,)),
        (WantedPiece(0, 0, ("x",), bytes(16)), (header,)),
        (WantedPiece(0, 0, ("x",), b"123"), (header,)),
        (WantedPiece(0, 0, ("x",), (7).to_bytes(8, "little")), (header,)),
    ):
        unit.send([frame(ReadRows(headers, (piece,)))])
        with pytest.raises(RLError):
            unit.expect(Sending)
    unit.send([frame(WriteBlock(8 * MIB - 64, 100_000, 0)), bytes(100_000)])
    with pytest.raises(WireError, match="no bytes"):
        unit.expect(Written)
    unit.send([(1 << 31).to_bytes(4, "little")])
    with pytest.raises(PlaneLostError):
        unit.expect(Written)
    unit.close()
    assert other_client(plane.descriptor).returncode == 0


def test_who_does_not_introduce_himself_is_sent_away() -> None:
    with (
        served(NO_KEY, Limits(handshake_s=0.1)) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=60) as silent,
    ):
        while silent.recv(100):
            pass
        deadline = time.monotonic() + 60
        while server._connections:  # the server closes its end first
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_write_that_arrives_after_its_span_was_abandoned_changes_nothing(plane: LocalPlane) -> None:
    """A write to an abandoned span is refused; the session can reserve and write the span later."""

    async def main() -> None:
        session = b"\x06" + os.urandom(7)
        lifeline = call_on(plane, plane.descriptor.controller, session)
        control = ControlClient(
            asyncio.get_running_loop(), ZmqLink(plane.descriptor.controller.control, session, load_key()), "controller"
        )
        await control.call(Hello(None), Done, 60)
        span = (await control.call(Reserve(6 * MIB, 0), Reserved, 60)).span
        late, later = (call_on(plane, plane.descriptor.units[0], session) for _ in range(2))
        control.tell(Abandon((span,), late=True))
        async with await connect(plane.descriptor) as other:
            meta = await other.put("p", ["a"], rows_of(1, 6 * MIB), timeout_s=60)
            late.send([frame(WriteBlock(span.offset, 64, 0)), bytes([66]) * 64])
            with pytest.raises(PlaneLostError):
                late.expect(Written)
            assert (await other.get(meta)).dense("x").values.max() == 1
            await other.clear("p")
        again = (await control.call(Reserve(6 * MIB, 0), Reserved, 60)).span
        assert again == span
        later.send([frame(WriteBlock(span.offset, 64, 1)), bytes([66]) * 64])
        later.expect(Written)
        for end in (lifeline, late, later, control):
            end.close()

    asyncio.run(main())
