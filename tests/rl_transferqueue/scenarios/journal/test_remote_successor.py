"""A controller with clients on other hosts is killed, and what belongs to it is refused."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from host_helpers import start_client
from network_helpers import NO_KEY, call_on, rows_of
from successor_helpers import START_S, numbers, restart

from rl_protocol import BatchData, ColumnSpec, ConfigError, PlaneLostError, PlaneTimeout, WireError, dense
from rl_transferqueue import LocalPlane, TransferQueueConfig, connect, start_local_plane
from rl_transferqueue.client import client as client_module
from rl_transferqueue.client.server_watch import CONTROLLER
from rl_transferqueue.transport.bulk_client import IncarnationEnded
from rl_transferqueue.transport.bulk_protocol import ReadRows, Sending, WantedPiece, WriteBlock, Written, frame
from rl_transferqueue.transport.control_client import ControlClient
from rl_transferqueue.transport.zmq_link import ZmqLink
from rl_transferqueue.wire.messages import Clear, Cleared, Done, Hello, Resume, Resumed, Rows, WaitReady

SESSION = b"\x07remote1"


def start(folder: Path, *, shared_memory: bool = False) -> LocalPlane:
    config = TransferQueueConfig(
        num_storage_units=1,
        capacity_mb=8,
        segment_mb=1,
        listen="127.0.0.1",
        shared_memory=shared_memory,
        durability="commit",
        journal_dir=str(folder / "journal"),
    )
    return start_local_plane(config, start_timeout_s=START_S, successor_s=600.0)


@asynccontextmanager
async def linked(plane: LocalPlane, incarnation: int) -> AsyncGenerator[ControlClient]:
    """Calls of SESSION on the controller with that number."""
    link = ZmqLink(plane.descriptor.controller.control, SESSION, NO_KEY, incarnation)
    with closing(ControlClient(asyncio.get_running_loop(), link, "controller")) as control:
        yield control


BODY = """
    await client.put("p", ["a", "b"], rows(1, 2))
    say("put")
    input()
    waiting = asyncio.ensure_future(client.wait_ready("p", count=3, fields=["x"], task="t", timeout_s=120))
    await client.put("p", ["c"], rows(3, 1))
    meta = await waiting
    x = (await client.get(meta)).dense("x").values
    say(*meta.keys, *x[:, 0].tolist(), client._descriptor.controller.incarnation)
"""


def test_clients_of_both_hosts_continue_with_the_successor_at_the_same_address(tmp_path: Path) -> None:
    async def main(plane: LocalPlane) -> None:
        controller = plane.descriptor.controller
        process = start_client("another", plane.descriptor, BODY)
        assert process.stdin is not None
        assert process.stdout is not None
        async with await connect(plane.descriptor) as client:
            assert await asyncio.to_thread(process.stdout.readline) == "put\n"
            await restart(plane)
            assert (plane.descriptor.controller.control, plane.descriptor.controller.bulk) == (
                controller.control,
                controller.bulk,
            )
            out, err = await asyncio.to_thread(process.communicate, "go on\n", 120)
            assert (out, process.returncode) == ("a b c 1 2 3 2\n", 0), err
            assert (await client.consumption_status("p", task="t")).flags.tolist() == [True] * 3
            meta = await client.list_rows("p", fields=["x"])
            assert (await client.get(meta)).dense("x").values[:, 0].tolist() == [1, 2, 3]

    with start(tmp_path, shared_memory=True) as plane:
        asyncio.run(main(plane))


def test_a_draft_of_the_controller_before_overwrites_no_new_row(tmp_path: Path) -> None:
    """The memory that the draft had reserved holds a row of another client when it is put."""

    async def main(plane: LocalPlane) -> None:
        async with await connect(plane.descriptor) as client, await connect(plane.descriptor) as other:
            draft = await client.alloc([ColumnSpec(name="x", kind="dense", dtype="int64", dims=(1000,))], 1)
            draft["x"][:] = 7
            await restart(plane)
            size = draft.span.nbytes  # type: ignore[attr-defined]
            keys = [f"k{i}" for i in range(6 * (1 << 20) // size)]
            rows = await other.put("p", keys, BatchData({"x": dense(np.ones((len(keys), 1000), np.int64))}))
            meta = await client.put("p", ["mine"], draft)
            assert (await client.get(meta)).dense("x").values.tolist() == [[7] * 1000]
            assert (await other.get(rows)).dense("x").values.min() == 1
            assert (await other.get(rows)).dense("x").values.max() == 1

    with start(tmp_path) as plane:
        asyncio.run(main(plane))


def test_a_unit_refuses_requests_that_belong_to_the_controller_before(tmp_path: Path) -> None:
    async def main(plane: LocalPlane) -> None:
        async with await connect(plane.descriptor) as client:
            before = call_on(plane, plane.descriptor.units[0], SESSION)
            await client.put("p", ["a"], rows_of(1, 1000))
            await restart(plane)
            meta = await client.put("p", ["b"], rows_of(2, 7 << 20))
            piece = WantedPiece(0, 0, ("x",), (0, 1))
            for unit in (before, call_on(plane, plane.descriptor.units[0], SESSION)):
                for incarnation in (1, 3):
                    unit.send([frame(WriteBlock(0, 7 << 20, 0, incarnation)), bytes(7 << 20)])
                    with pytest.raises(IncarnationEnded, match="serves controller 2"):
                        unit.expect(Written)
                    unit.send([frame(ReadRows((b"",), (piece,), incarnation))])
                    with pytest.raises(IncarnationEnded, match="serves controller 2"):
                        unit.expect(Sending)
                unit.send([frame(ReadRows((b"",), (piece,), 2))])
                with pytest.raises(WireError, match="header"):
                    unit.expect(Sending)
                unit.close()
            assert (await client.get(meta)).dense("x").values.min() == 2

    with start(tmp_path) as plane:
        asyncio.run(main(plane))


def test_a_client_that_hears_of_the_successor_from_a_unit_continues_with_it(tmp_path: Path) -> None:
    """Its loop has not yet seen the end of its controller when a unit refuses its put and get."""

    async def main(plane: LocalPlane) -> None:
        async with await connect(plane.descriptor) as client:
            await client.put("q", ["r"], numbers(1))  # the client now has a reserve
            meta = await client.put("p", ["a"], numbers(1))
            place = await client._reader._locate(
                ("p", ("a",), ("x",), meta.generations), asyncio.get_running_loop().time()
            )
            asyncio.get_running_loop().remove_reader(client._servers._running[CONTROLLER])
            await restart(plane)
            with pytest.raises(PlaneLostError):
                await client._memory.read(place.groups(("x",)), ("x",), place.anchor, 60)
            assert client._search is not None
            assert (await client.get(meta, timeout_s=60)).dense("x").values.tolist() == [1]
            asyncio.get_running_loop().remove_reader(client._servers._running[CONTROLLER])
            await client.put("q", ["s"], numbers(1))  # another reserve
            await restart(plane)
            assert (await client.put("p", ["b"], numbers(2), timeout_s=60)).generations == (4,)
            assert client._descriptor.controller.incarnation == 3

    with start(tmp_path) as plane:
        asyncio.run(main(plane))


def test_a_controller_drops_frames_that_are_meant_for_another_one(tmp_path: Path) -> None:
    async def main(plane: LocalPlane) -> None:
        async with await connect(plane.descriptor) as client, linked(plane, 1) as early:
            await client.put("p", ["a"], numbers(1))
            await early.call(Clear("q", None), Cleared, 60)
            os.kill(plane.pids[0], signal.SIGKILL)
            early.tell(Clear("p", None))  # the link sends it to the successor
            await restart(plane)
            with pytest.raises(PlaneTimeout):
                await early.call(Clear("p", None), Cleared, 1)
            assert (await client.list_rows("p")).keys == ("a",)
            async with linked(plane, 2) as late:
                assert (await late.call(Clear("p", None), Cleared, 60)).count == 1

    with start(tmp_path) as plane:
        asyncio.run(main(plane))


def test_a_client_that_lost_its_connection_alone_is_told_so_and_can_not_continue(tmp_path: Path) -> None:
    """The rows on its way are handed out again, so the successor must refuse it."""

    async def main(plane: LocalPlane) -> None:
        controller = plane.descriptor.controller
        async with await connect(plane.descriptor) as client, await connect(plane.descriptor) as broken:
            await client.put("p", ["a"], numbers(1))
            async with linked(plane, 1) as control:
                lifeline = call_on(plane, controller, SESSION)
                await control.call(Hello(None), Done, 60)
                taken = await control.call(WaitReady("p", 1, (), {}, "t", 60), Rows, 60)
                assert taken.keys == ("a",)
                lifeline.close()
                again = await client.wait_ready("p", count=1, task="t", timeout_s=60)
                assert again.keys == ("a",)
            with socket.socket(fileno=os.dup(broken._servers._running[CONTROLLER])) as connection:
                connection.shutdown(socket.SHUT_RDWR)
            with pytest.raises(PlaneLostError, match=r"the controller runs|can't be reached"):
                await broken.wait_ready("p", count=2, timeout_s=60)
            await restart(plane)
            lifeline = call_on(plane, plane.descriptor.controller, SESSION)
            async with linked(plane, 2) as control:
                with pytest.raises(WireError, match="did not come back in time"):
                    await control.call(Resume(2, None, "", ()), Resumed, 60)
            lifeline.close()
            assert (await client.consumption_status("p", task="t")).flags.tolist() == [True]

    with start(tmp_path) as plane:
        asyncio.run(main(plane))


def test_a_successor_that_dies_while_clients_come_back_has_a_successor(tmp_path: Path) -> None:
    async def main(plane: LocalPlane) -> None:
        async with await connect(plane.descriptor) as client:
            await client.put("p", ["a"], numbers(1))
            resume, tried = client._controller.resume, asyncio.Event()

            async def killing(*arguments: Any) -> Any:
                if not tried.is_set():
                    tried.set()
                    os.kill(plane.pids[0], signal.SIGKILL)
                return await resume(*arguments)

            client._controller.resume = killing  # type: ignore[method-assign]
            await restart(plane)
            await asyncio.wait_for(tried.wait(), 60)
            await restart(plane)
            assert (await client.list_rows("p", timeout_s=60)).keys == ("a",)
            assert client._descriptor.controller.incarnation == 3

    with start(tmp_path) as plane:
        asyncio.run(main(plane))


def test_a_client_with_another_key_is_refused_for_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_OTHER_PROCESS_S", 0.1)
    with start(tmp_path) as plane:
        monkeypatch.setenv("RL_TQ_KEY", "another key, of 32 bytes or more.")
        with pytest.raises(ConfigError, match="another key"):
            asyncio.run(connect(plane.descriptor, timeout_s=60))
