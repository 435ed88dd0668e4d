"""Killed servers, clients and parents, and malformed messages."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from abandoned_memory import no_memory_left
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from polling import until

from rl_protocol import (
    BatchData,
    BatchError,
    ColumnSpec,
    DataLostError,
    DataPlaneError,
    PlaneLostError,
    PlaneTimeout,
    dense,
)
from rl_protocol.errors import WireError
from rl_protocol.support.heartbeat import read_beat
from rl_protocol.support.host.portable import uses_linux
from rl_protocol.wire import plan
from rl_transferqueue import Client, LocalPlane, PlaneDescriptor, TransferQueueConfig, connect, start_local_plane
from rl_transferqueue.transport.unix_link import Frames
from rl_transferqueue.wire import messages
from rl_transferqueue.wire.messages import MAX_FRAME, AnyRequest, Failure, Hello, ListRows, Reply, Request, pack
from rl_transferqueue.wire.process_liveness import ProcessId, this_process

SMALL = TransferQueueConfig(num_storage_units=1, capacity_mb=2, segment_mb=1)


def runs(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def batch(nbytes: int) -> BatchData:
    return BatchData({"x": dense(np.ones((1, nbytes), np.uint8))})


# --------------------------------------------------------------------------------
# Killed servers
@pytest.mark.parametrize("victim", [0, 1], ids=["controller", "unit"])
def test_every_call_says_that_the_plane_is_lost(victim: int) -> None:
    """The client notices that the unit has ended, or the controller reports that all have."""

    async def main(plane: LocalPlane) -> None:
        client = await connect(plane.descriptor)
        meta = await client.put("p", ["a"], batch(1 << 20))
        view = await client.get(meta)
        calls = [
            asyncio.ensure_future(client.wait_ready("p", count=2, timeout_s=60)),
            asyncio.ensure_future(client.put("p", ["full"], batch(3 << 19), timeout_s=60)),
        ]
        await asyncio.sleep(0.05)
        began = time.monotonic()
        os.kill(plane.pids[victim], signal.SIGKILL)
        for call in calls:
            with pytest.raises(PlaneLostError, match=["controller", "storage unit"][victim]):
                await call
        assert time.monotonic() - began < 60
        for again in (client.get(meta), client.put("p", ["b"], batch(1)), client.list_rows("p"), client.stats()):
            with pytest.raises(PlaneLostError):
                await again
        assert view.dense("x").values.all()
        await client.close()
        with pytest.raises(PlaneLostError):
            await connect(plane.descriptor)
        assert time.monotonic() - began < 60

    with start_local_plane(SMALL) as plane:
        asyncio.run(main(plane))


def test_when_one_unit_of_several_dies_the_others_go_on_and_the_lost_rows_are_named() -> None:
    """The rows of two puts lie in two units; one unit is killed while a reader waits for rows."""
    config = TransferQueueConfig(num_storage_units=2, capacity_mb=64, segment_mb=1)

    def rows(value: int) -> BatchData:
        return BatchData({"x": dense(np.full((2, 1 << 20), value, np.uint8)), "y": dense([value, value])})

    async def main(plane: LocalPlane) -> None:
        async with await connect(plane.descriptor) as client, await connect(plane.descriptor) as other:
            first = await client.put("p", ["a", "b"], rows(1), tags=[{"n": 1}, {"n": 2}])
            second = await client.put("p", ["c", "d"], rows(2))
            view = (await client.get(first)).dense("x").values
            await other.get(second)
            waiting = asyncio.ensure_future(other.wait_ready("p", count=5, fields=["x"], timeout_s=60))
            watching = (await other.watch("p", timeout_s=60)).version
            await asyncio.sleep(0.05)
            began = time.monotonic()
            os.kill(plane.pids[1], signal.SIGKILL)
            changes = await other.watch("p", since=watching, timeout_s=60)
            assert time.monotonic() - began < 60
            lost, kept, value = (first, second, 2) if changes.rows.keys == first.keys else (second, first, 1)
            assert changes.rows.keys == lost.keys
            stats = await client.stats()
            assert stats.lost == {"p": lost.keys}
            assert stats.bytes_capacity == config.unit_bytes
            for plane_client in (client, other):
                with pytest.raises(DataLostError, match=rf"'x'.*'{lost.keys[0]}'.*'p'.*lost"):
                    await plane_client.get(lost)
                assert (await plane_client.get(kept)).dense("x").values.max() == value
            assert (view == 1).all()
            produced = await client.production_status("p", fields=["x", "y"])
            assert [key for key, flag in zip(produced.keys, produced.flags.all(axis=1), strict=True) if not flag] == [
                *lost.keys
            ]
            assert (await client.list_rows("p", where={"n": 2})).keys == ("b",)

            again = await client.put("p", lost.keys, rows(7))
            assert again.generations == lost.generations
            assert (await other.get(lost)).dense("x").values.min() == 7
            await client.put("p", ["e"], rows(3).slice(0, 1))
            assert (await waiting).keys == ("a", "b", "c", "d", "e")
            stats = await client.stats()
            assert (stats.lost, stats.bytes_used) == ({}, sum((2 << 20) + 64 for _ in range(2)) + (1 << 20) + 64)
            await client.clear("p")
            del view
            deadline = time.monotonic() + 60
            while (await client.stats()).bytes_used:
                assert time.monotonic() < deadline, "the memory of the unit that lives did not come back"
                await asyncio.sleep(0.02)
        async with await connect(plane.descriptor) as late:
            assert (await late.get(await late.put("q", ["a"], batch(100)))).dense("x").values.all()

    with start_local_plane(config) as plane:
        asyncio.run(main(plane))


def test_a_put_that_is_written_while_its_unit_dies_goes_to_another() -> None:
    config = TransferQueueConfig(num_storage_units=2, capacity_mb=64, segment_mb=1)

    async def main(plane: LocalPlane) -> None:
        async with await connect(plane.descriptor) as client:
            big = BatchData({"x": dense(np.ones((4, 4 << 20), np.uint8))})
            drafts = [await client.alloc([ColumnSpec(name="x", kind="dense", dtype="uint8")], 64) for _ in range(2)]
            for draft in drafts:
                draft["x"][:] = 1
            os.kill(plane.pids[1], signal.SIGKILL)
            meta = await client.put("p", [f"{j}" for j in range(4)], big)
            await noticed(client, config.unit_bytes)
            for i, draft in enumerate(drafts):
                keys = [f"{i}/{j}" for j in range(64)]
                assert (await client.get(await client.put("q", keys, draft))).dense("x").values.all()
                with pytest.raises(BatchError, match="put or discarded"):
                    draft["x"]
            # The unit may have died after the write and before the client noticed.
            if (await client.stats()).lost:
                await client.put("p", meta.keys, big)
            assert (await client.get(meta)).dense("x").values.all()

    with start_local_plane(config) as plane:
        asyncio.run(main(plane))


async def noticed(client: Client, capacity: int) -> None:
    """Wait until the controller has noticed the ended units and has `capacity` bytes left."""
    deadline = time.monotonic() + 60
    while (await client.stats()).bytes_capacity > capacity:
        assert time.monotonic() < deadline, "the death of the unit was not noticed"
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("shared_memory", [True, False], ids=["here", "tcp"])
@pytest.mark.parametrize("sleep", [False, True], ids=["at once", "once noticed"])
def test_no_put_fails_because_the_reserve_lies_in_a_unit_that_died(shared_memory: bool, sleep: bool) -> None:
    """Puts of 8 bytes take memory from a reserve of 64 KiB, which lies in the killed unit."""
    listen = {} if shared_memory else {"listen": "127.0.0.2", "shared_memory": False}
    config = TransferQueueConfig(num_storage_units=2, capacity_mb=64, segment_mb=1, **listen)

    async def main(plane: LocalPlane) -> None:
        async with await connect(plane.descriptor) as client:
            await client.put("p", ["first"], batch(8))
            (reserve,) = [gap for gap in [client._writer._reservation._spare] if gap is not None]
            os.kill(plane.pids[1 + reserve.unit], signal.SIGKILL)
            if sleep:
                await noticed(client, config.unit_bytes)
            draft = await client.alloc([ColumnSpec(name="x", kind="dense", dtype="uint8")], 8)
            for i in range(600):
                await client.put("p", [f"{i}"], batch(8))
            await client.put("q", [f"{i}" for i in range(8)], draft)
            await noticed(client, config.unit_bytes)
            assert client._writer._reservation._spare is None or client._writer._reservation._spare.unit != reserve.unit
            meta = await client.put("p", ["last"], batch(8))
            assert (await client.get(meta)).dense("x").values.all()
            lost = (await client.stats()).lost.get("p", ())
            kept = [key for key in (await client.list_rows("p")).keys if key not in lost]
            assert kept[-1] == "last"
            assert (await client.get((await client.list_rows("p", keys=kept)), ["x"])).dense("x").values.shape[
                0
            ] == len(kept)

    with start_local_plane(config) as plane:
        asyncio.run(main(plane))


@pytest.mark.parametrize("shared_memory", [True, False], ids=["here", "tcp"])
@pytest.mark.parametrize("known", [True, False], ids=["read before", "not read before"])
def test_a_get_that_meets_the_death_of_a_unit_says_that_the_data_is_lost(shared_memory: bool, known: bool) -> None:
    """Until the controller notices, a get may still return rows; it never raises PlaneLostError."""
    listen = {} if shared_memory else {"listen": "127.0.0.2", "shared_memory": False}
    config = TransferQueueConfig(num_storage_units=2, capacity_mb=64, segment_mb=1, **listen)

    async def main(plane: LocalPlane) -> None:
        async with await connect(plane.descriptor) as writer, await connect(plane.descriptor) as reader:
            metas = [await writer.put("p", [f"{i}"], batch(1 << 20)) for i in range(4)]
            for meta in metas if known else ():
                await reader.get(meta)
            getting = [asyncio.ensure_future(reader.get(meta)) for meta in metas * 4]
            os.kill(plane.pids[1], signal.SIGKILL)
            getting += [asyncio.ensure_future(reader.get(meta)) for meta in metas]
            for got in await asyncio.gather(*getting, return_exceptions=True):
                assert isinstance(got, BatchData | DataLostError), got
            await noticed(reader, config.unit_bytes)
            lost = (await reader.stats()).lost["p"]
            assert len(lost) == 2
            for meta in metas:
                if meta.keys[0] in lost:
                    with pytest.raises(DataLostError, match=f"{meta.keys[0]}"):
                        await reader.get(meta)
                else:
                    assert (await reader.get(meta)).dense("x").values.all()

    with start_local_plane(config) as plane:
        asyncio.run(main(plane))


def test_a_stopped_server_is_a_timeout() -> None:
    async def main(plane: LocalPlane) -> None:
        async with await connect(plane.descriptor) as client:
            os.kill(plane.pids[0], signal.SIGSTOP)
            with pytest.raises(PlaneTimeout):
                await client.list_rows("p", timeout_s=0.1)
            with pytest.raises(PlaneTimeout):
                await connect(plane.descriptor, timeout_s=0.1)
            os.kill(plane.pids[0], signal.SIGCONT)
            assert (await client.list_rows("p", timeout_s=60)).keys == ()

    with start_local_plane(SMALL) as plane:
        asyncio.run(main(plane))


# --------------------------------------------------------------------------------
# Killed clients
DYING_CLIENT = """
import asyncio, os, signal, sys
import numpy as np
from rl_protocol import BatchData, dense
from rl_transferqueue import PlaneDescriptor, connect
from rl_transferqueue.wire.messages import Reserve, Reserved

async def main():
    client = await connect(PlaneDescriptor.from_json(sys.argv[1]))
    meta = await client.put("p", ["committed"], BatchData({"x": dense(np.full((1, 1 << 18), 7, np.uint8))}))
    view = await client.get(meta)
    await client._controller.call(Reserve(1 << 18, 0.0), Reserved, 60)
    asyncio.ensure_future(client.wait_ready("p", count=2, task="t", timeout_s=60))
    asyncio.ensure_future(client.put("p", ["waits"], BatchData({"x": dense(np.zeros((1, 15 << 17), np.uint8))})))
    await asyncio.sleep(0.2)
    print("up", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_a_killed_client_leaves_what_it_committed_and_nothing_else() -> None:
    async def while_it_lives(plane: LocalPlane) -> None:
        async with await connect(plane.descriptor) as client:
            stats = await client.stats()
            assert (stats.bytes_used, stats.bytes_reserved) == (1 << 18, 1 << 18)

    async def after_its_death(plane: LocalPlane) -> None:
        async with await connect(plane.descriptor) as client:
            deadline = time.monotonic() + 60
            while (await client.stats()).bytes_reserved:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.02)
            assert (await client.stats()).bytes_used == 1 << 18
            meta = await client.list_rows("p")
            assert (await client.get(meta)).dense("x").values.min() == 7
            await client.put("p", ["more"], batch(1))
            assert (await client.wait_ready("p", count=2, task="t", timeout_s=60)).keys == ("committed", "more")
            await client.clear("p")
            while (await client.stats()).bytes_used:  # until the end of the process is noticed
                assert time.monotonic() < deadline
                await asyncio.sleep(0.02)

    with start_local_plane(SMALL) as plane:
        command = [sys.executable, "-c", DYING_CLIENT, plane.descriptor.to_json()]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as dying:
            assert dying.stdout is not None
            assert dying.stdout.readline() == b"up\n"
            asyncio.run(while_it_lives(plane))
            dying.kill()
        asyncio.run(after_its_death(plane))


# --------------------------------------------------------------------------------
# Killed parents
PARENT = """
import sys, time
from pathlib import Path
from rl_transferqueue import TransferQueueConfig, start_local_plane

plane = start_local_plane(TransferQueueConfig(capacity_mb=2), Path(sys.argv[1]))
print(*plane.pids, flush=True)
if sys.argv[2] == "exit":
    sys.exit(0)
time.sleep(60)
"""


@pytest.mark.parametrize("how", ["kill", "exit"])
def test_when_the_parent_dies_nothing_stays_behind(tmp_path: Path, how: str) -> None:
    with no_memory_left():
        command = [sys.executable, "-W", "ignore", "-c", PARENT, str(tmp_path), how]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
            assert parent.stdout is not None
            pids = [int(pid) for pid in parent.stdout.readline().split()]
            assert len(pids) == 3
            if how == "kill":
                assert all(runs(pid) for pid in pids)
                parent.kill()
        until(lambda: not any(runs(pid) for pid in pids), "the children end")
        assert list(tmp_path.iterdir()) == []


def test_close_ends_everything_and_may_be_called_twice(tmp_path: Path) -> None:
    plane = start_local_plane(SMALL, str(tmp_path), log_dir=str(tmp_path / "logs"))
    private = next(path for path in tmp_path.iterdir() if path.name != "logs")
    assert private.stat().st_mode & 0o777 == 0o700
    pids = plane.pids
    beats = {f"{pid}.beat" for pid in pids}
    assert {path.name for path in private.iterdir()} == {".rl-temporary", "c", "plane.json", "u0", *beats}
    assert {file.name: read_beat(file) is None for file in plane.heartbeats.values()} == dict.fromkeys(beats, False)
    began = time.monotonic()
    plane.close()
    plane.close()
    assert time.monotonic() - began < 60
    assert not any(runs(pid) for pid in pids)
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]
    assert "serving" in (tmp_path / "logs" / "unit-0.log").read_text()


def test_children_do_not_hear_the_terminal(tmp_path: Path) -> None:
    with start_local_plane(SMALL) as plane:
        assert all(os.getsid(pid) == pid for pid in plane.pids)


MANY_CLIENTS = """
import asyncio, resource
from contextlib import AsyncExitStack
from rl_transferqueue import TransferQueueConfig, connect, start_local_plane

FEW = 64

async def main(descriptor):
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(await connect(descriptor)) for _ in range(FEW)]
        await clients[0].put("p", ["a"], tags=[{"n": 1}])
        print(*(await clients[-1].list_rows("p")).keys)

if __name__ == "__main__":
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, most))
    plane = start_local_plane(TransferQueueConfig(capacity_mb=8, segment_mb=1))
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with plane:
        asyncio.run(main(plane.descriptor))
"""


@pytest.mark.skipif(not uses_linux(), reason="the limit stays as it is")
def test_a_plane_serves_more_clients_than_the_limit_of_its_shell_allows() -> None:
    """In a process of its own: the limit holds for all threads, and libzmq aborts at it."""
    done = subprocess.run(
        [sys.executable, "-c", MANY_CLIENTS], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "a\n"), done.stderr


def test_a_child_that_does_not_come_up_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "zmq").mkdir()
    (tmp_path / "zmq" / "__init__.py").write_text("raise RuntimeError('no zmq today')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    base = tmp_path / "run"
    base.mkdir()
    with pytest.raises(PlaneLostError, match=r"(?s)unit-0 process .* ended with status 1.*no zmq today"):
        start_local_plane(SMALL, base)
    assert list(base.iterdir()) == []


def test_a_descriptor_of_a_plane_that_is_gone(tmp_path: Path) -> None:
    with start_local_plane(SMALL) as plane:
        text = plane.descriptor.to_json()
    with pytest.raises(PlaneLostError, match="does not run"):
        asyncio.run(_open_and_close(PlaneDescriptor.from_json(text)))
    with pytest.raises(WireError, match="descriptor"):
        PlaneDescriptor.from_json("{}")


async def _open_and_close(descriptor: PlaneDescriptor) -> None:
    await (await connect(descriptor)).close()


def test_a_process_that_took_the_pid_of_a_server_is_not_mistaken_for_it(plane: LocalPlane) -> None:
    controller = plane.descriptor.controller
    other = msgspec.structs.replace(controller, process=ProcessId(controller.process.pid, controller.process.start + 1))
    with pytest.raises(PlaneLostError, match="does not run"):
        asyncio.run(_open_and_close(msgspec.structs.replace(plane.descriptor, controller=other)))


def test_memory_that_may_not_be_opened_is_explained(plane: LocalPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object, *rest: object) -> int:
        raise PermissionError(13, "Permission denied", path)

    async def main() -> None:
        async with await connect(plane.descriptor) as client:
            monkeypatch.setattr("rl_transferqueue.memory.arena._mappings", {})
            monkeypatch.setattr("rl_transferqueue.memory.arena.os.open", refuse)
            with pytest.raises(DataPlaneError, match="must run as the user"):
                await client.put("p", ["a"], batch(100))
            monkeypatch.undo()
            assert (await client.stats()).bytes_used == 0

    asyncio.run(main())


# --------------------------------------------------------------------------------
# Malformed data
class Raw:
    """A client that sends arbitrary frames."""

    def __init__(self, address: str, identity: bytes | None = None) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(60)
        self.socket.connect(address.removeprefix("unix:"))
        self.said = Frames()
        self.heard: list[bytes] = []
        self.send(identity or os.urandom(8))

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, frame: bytes) -> None:
        self.socket.sendall(len(frame).to_bytes(4, "little") + frame)

    def hear(self) -> Reply:
        while not self.heard:
            data = self.socket.recv(1 << 16)
            assert data, "the connection was closed"
            self.heard += self.said.feed(data)
        return msgspec.msgpack.decode(self.heard.pop(0), type=Reply)

    def ask(self, frame: bytes) -> Reply:
        self.send(frame)
        return self.hear()


def addresses(plane: LocalPlane) -> list[str]:
    return [plane.descriptor.controller.address, plane.descriptor.units[0].address]


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(frames=st.lists(st.binary(max_size=40), min_size=1, max_size=5))
def test_garbage_is_answered_and_harmless(shared_plane: LocalPlane, frames: list[bytes]) -> None:
    for address in addresses(shared_plane):
        with Raw(address) as raw:
            for frame in frames:
                answer = raw.ask(frame)
                assert isinstance(answer.body, Failure)
                assert answer.body.error == "WireError"
            answer = raw.ask(pack(Request(7, Hello(ProcessId(1, 1)))))
            assert answer.id == 7
            assert isinstance(answer.body, Failure)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(stream=st.binary(min_size=1, max_size=60))
def test_a_stream_without_frames_is_harmless(shared_plane: LocalPlane, stream: bytes) -> None:
    """Truncated frames and impossible lengths end their own connection at most."""
    for address in addresses(shared_plane):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(address.removeprefix("unix:"))
            raw.sendall(stream)
        with Raw(address) as fine:
            assert isinstance(fine.ask(b"").body, Failure)


def test_a_frame_that_is_too_long_ends_the_connection(plane: LocalPlane) -> None:
    for address in addresses(plane):
        with Raw(address) as raw:
            raw.socket.sendall((MAX_FRAME + 1).to_bytes(4, "little"))
            assert raw.socket.recv(1) == b""


def test_a_client_that_does_not_read_its_answers_delays_no_other(plane: LocalPlane) -> None:
    async def main() -> None:
        async with await connect(plane.descriptor) as client:
            keys = [f"{'k' * 100}{i}" for i in range(2000)]
            await client.put("big", keys, tags=[{}] * len(keys))
            with Raw(plane.descriptor.controller.address) as raw:
                for i in range(50):
                    raw.send(pack(Request(i + 1, ListRows("big", {}))))
                await asyncio.sleep(0.2)
                assert len(await client.list_rows("big", timeout_s=60)) == 2000
                for i in range(50):
                    answer = await asyncio.to_thread(raw.hear)
                    assert (answer.id, len(answer.body.keys)) == (i + 1, 2000)  # type: ignore[union-attr]

    asyncio.run(main())


def test_a_request_that_can_only_be_read_in_part_is_answered_by_its_id(plane: LocalPlane) -> None:
    for address in addresses(plane):
        with Raw(address) as raw:
            for body in (["Unknown", 1], ["Hello", [1, 2], "one too many"], ["Hello", [1, 2.5]], None, {"a": 1}):
                answer = raw.ask(msgspec.msgpack.encode([41, body]))
                assert answer.id == 41
                assert isinstance(answer.body, Failure)
                assert answer.body.error == "WireError"


def _aligned(number: int) -> int:
    return number * 64 if number < 1 << 50 else number // 64 * 64


def nonsense() -> st.SearchStrategy[AnyRequest]:
    """Generate messages of every type with meaningless values."""
    number = st.one_of(st.integers(0, 3), st.integers(0, 1 << 62))
    text = st.sampled_from(["", "p", "q"])
    texts = st.lists(text, max_size=3).map(tuple)
    raw = st.binary(max_size=24)
    seconds = st.floats(0, 0.01)
    tag = st.dictionaries(text, st.one_of(st.none(), st.integers(0, 3), text), max_size=2)
    span = st.builds(messages.Span, number, number.map(_aligned), number.map(_aligned))
    column = st.builds(messages.TagColumn, text, st.lists(st.integers(0, 3), max_size=3).map(tuple), raw)
    columns = st.lists(column, max_size=2).map(tuple)
    expect = st.one_of(st.none(), st.lists(st.one_of(st.none(), tag), max_size=3).map(tuple))
    header = st.one_of(raw, st.just(GOOD_HEADER))
    ids = st.lists(number, max_size=3).map(tuple)
    task = st.one_of(st.none(), text)
    return st.one_of(
        st.builds(messages.Hello, st.builds(ProcessId, st.integers(0, 1 << 40), number)),
        st.builds(messages.Reserve, number, seconds),
        st.builds(messages.Abandon, st.lists(span, max_size=3).map(tuple)),
        st.builds(messages.Commit, text, texts, columns, expect, st.one_of(st.none(), span), header, number),
        st.builds(messages.Locate, number, text, texts, texts, raw),
        st.builds(messages.FindHosts, text, texts),
        st.builds(messages.ReleaseLeases, ids),
        st.builds(messages.WaitReady, text, number, texts, tag, task, seconds),
        st.builds(messages.ListRows, text, tag, texts, task, st.one_of(st.none(), texts)),
        st.builds(messages.Watch, text, number, tag, seconds),
        st.builds(messages.Claim, text, texts, text),
        st.builds(messages.GetConsumption, text, text),
        st.builds(messages.GetProduction, text, texts),
        st.builds(messages.ResetConsumption, text, task, st.one_of(st.none(), texts)),
        st.builds(messages.Clear, text, st.one_of(st.none(), texts)),
        st.just(messages.GetStats()),
        st.builds(messages.Cancel, number),
        st.builds(messages.Populate, number),
        st.builds(messages.Measure, span, header, raw, texts),
        st.builds(messages.Copy, span, header, raw, texts, span),
        st.just(messages.Bye()),
    )


GOOD_HEADER = msgspec.msgpack.encode(plan(BatchData({"p": dense([1.0])})))


@pytest.fixture(scope="module")
def own_plane() -> Iterator[LocalPlane]:
    """Yield a separate plane, because peers that allocate without `Hello` may leak its memory."""
    with start_local_plane(TransferQueueConfig(capacity_mb=32, segment_mb=1)) as plane:
        yield plane


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
def test_well_formed_nonsense_is_harmless(own_plane: LocalPlane, data: st.DataObject) -> None:
    said = data.draw(st.lists(nonsense(), min_size=1, max_size=8))
    for address in addresses(own_plane):
        with Raw(address, b"\x02" + os.urandom(7)) as raw:
            raw.send(pack(Request(1, Hello(this_process()))))
            for i, message in enumerate(said):
                raw.send(pack(Request(i + 2, message)))
            answer = raw.ask(b"end")
            while not (answer.id == 0 and isinstance(answer.body, Failure)):
                answer = raw.hear()
    asyncio.run(_put_and_clear(own_plane.descriptor))


async def _put_and_clear(descriptor: PlaneDescriptor) -> None:
    async with await connect(descriptor) as client:
        meta = await client.put("fine", ["a"], batch(100))
        assert (await client.get(meta)).dense("x").values.all()
        await client.clear("fine")
