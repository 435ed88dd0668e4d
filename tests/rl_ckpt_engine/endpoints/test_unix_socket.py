"""Endpoints that another process calls over a Unix socket."""

from __future__ import annotations

import asyncio
import os
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from rl_ckpt_engine import connect, serve
from rl_ckpt_engine.endpoints.operations import Endpoint, operation
from rl_protocol import ConfigError, RLError, WeightSyncError, WorkerDiedError, WorkerError


class Adder(Endpoint):
    """Adds, and fails in several ways."""

    @operation
    async def add(self, a: int, b: int) -> int:
        return a + b

    @operation
    async def pid(self) -> int:
        return os.getpid()

    @operation
    async def fail(self, how: str) -> int:
        errors: dict[str, Exception] = {
            "known": WeightSyncError("it did not fit"),
            "own": OwnError("mine"),
            "os": FileNotFoundError("x"),
            "bug": ZeroDivisionError("bug"),
        }
        raise errors[how]

    @operation
    async def sleep(self, seconds: float, timeout_s: float) -> int:
        await asyncio.sleep(seconds)
        return 1


class OwnError(RLError):
    """Of another package, which the caller does not know."""


class Other(Endpoint):
    @operation
    async def multiply(self, a: int, b: int) -> int:
        return a * b


@pytest.fixture
def path() -> Iterator[Path]:
    """The path of a socket; those of pytest may be longer than the 107 bytes that it can have."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder, "worker.sock")


SERVER = """
import asyncio, os, sys
from pathlib import Path
from rl_ckpt_engine import serve
from rl_ckpt_engine.endpoints.operations import Endpoint, operation

class Adder(Endpoint):
    @operation
    async def add(self, a: int, b: int) -> int:
        return a + b

    @operation
    async def pid(self) -> int:
        return os.getpid()

async def main():
    async with serve(Adder(), Path(sys.argv[1])):
        await asyncio.to_thread(sys.stdin.readline)

asyncio.run(main())
"""


def test_another_process_answers_and_leaves_no_socket(path: Path):
    process = subprocess.Popen([sys.executable, "-c", SERVER, str(path)], stdin=subprocess.PIPE)

    async def ask() -> tuple[int, int, str]:
        adder = await connect(Adder, path)  # the process does not listen yet
        return await adder.add(2, 3), await adder.pid(), adder.name

    try:
        assert asyncio.run(ask()) == (5, process.pid, "worker")
        process.communicate(b"end\n", timeout=60)
    finally:
        process.kill()
    assert process.wait() == 0
    assert not path.exists()


def test_a_path_may_be_text(path: Path):
    async def run() -> int:
        async with serve(Adder(), str(path)):
            return await (await connect(Adder, str(path))).add(1, 2)

    assert asyncio.run(run()) == 3


def test_calls_run_side_by_side(path: Path):
    async def run() -> list[int]:
        async with serve(Adder(), path):
            adder = await connect(Adder, path)
            slow = asyncio.create_task(adder.sleep(60.0, 60.0))
            quick = await adder.add(1, 1)
            assert not slow.done()
        with pytest.raises(WorkerDiedError):  # the end of the context cancels it
            await slow
        return [quick]

    assert asyncio.run(run()) == [2]


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("known", WeightSyncError, "worker: it did not fit"),
        ("own", WorkerError, "worker: mine"),
        ("os", WorkerError, "worker: FileNotFoundError: x"),
    ],
)
def test_an_error_keeps_its_type_and_message(how: str, kind: type[RLError], message: str, path: Path):
    async def run() -> None:
        async with serve(Adder(), path):
            await (await connect(Adder, path)).fail(how)

    with pytest.raises(RLError) as caught:
        asyncio.run(run())
    assert type(caught.value) is kind
    assert str(caught.value) == message


def test_a_bug_of_the_endpoint_ends_the_call_and_not_the_server(path: Path):
    async def run() -> int:
        shown: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: shown.append(context["exception"]))
        async with serve(Adder(), path):
            adder = await connect(Adder, path)
            with pytest.raises(WorkerDiedError, match="worker has not answered"):
                await adder.fail("bug")
            assert [type(each) for each in shown] == [ZeroDivisionError]
            return await adder.add(1, 1)

    assert asyncio.run(run()) == 2


def test_a_late_answer_is_a_timeout(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rl_ckpt_engine.endpoints.operations.MARGIN_S", 0.0)

    async def run() -> None:
        async with serve(Adder(), path):
            await (await connect(Adder, path)).sleep(60.0, 0.05)

    with pytest.raises(TimeoutError):
        asyncio.run(run())


def test_a_process_that_is_gone_is_named_at_once(path: Path):
    async def run() -> None:
        async with serve(Adder(), path):
            adder = await connect(Adder, path, name="rollout-3")
        await adder.add(1, 1)

    with pytest.raises(WorkerDiedError, match="rollout-3"):
        asyncio.run(run())


def test_connecting_has_a_deadline(path: Path):
    with pytest.raises(WorkerDiedError, match=r"within 0\.1 s"):
        asyncio.run(connect(Adder, path, timeout_s=0.1))


def test_another_endpoint_is_refused(path: Path):
    async def run() -> None:
        async with serve(Adder(), path):
            await (await connect(Other, path)).multiply(1, 1)

    with pytest.raises(WorkerError, match="Adder has no operation 'multiply'"):
        asyncio.run(run())


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_only_this_user_can_connect_and_a_path_is_served_once(path: Path):
    async def run() -> None:
        async with serve(Adder(), path):
            assert mode(path) == 0o600
            async with serve(Adder(), path):
                pass

    with pytest.raises(ConfigError, match="exists"):
        asyncio.run(run())
    assert not path.exists()


def test_the_socket_of_a_killed_process_is_replaced(path: Path):
    with subprocess.Popen([sys.executable, "-c", SERVER, str(path)], stdin=subprocess.PIPE) as process:
        asyncio.run(connect(Adder, path))
        process.kill()
    assert path.is_socket()

    async def run() -> int:
        async with serve(Adder(), path):
            return await (await connect(Adder, path)).add(2, 3)

    assert asyncio.run(run()) == 5


def test_a_file_at_the_path_is_kept(path: Path):
    path.write_bytes(b"weights")

    async def run() -> None:
        async with serve(Adder(), path):
            pass

    with pytest.raises(ConfigError, match="no socket"):
        asyncio.run(run())
    assert path.read_bytes() == b"weights"


def test_a_path_that_is_too_long_is_refused(path: Path):
    async def run() -> None:
        async with serve(Adder(), path.with_name("x" * 200)):
            pass

    with pytest.raises(ConfigError, match="107 bytes"):
        asyncio.run(run())


@pytest.mark.parametrize(
    "sent", [b"\xc1", msgspec.msgpack.encode(["weights.add", b"\xc1"]), msgspec.msgpack.encode([1])], ids=repr
)
def test_unreadable_requests_are_refused(sent: bytes, path: Path):
    async def run() -> list[object]:
        async with serve(Adder(), path):
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(struct.pack("<I", len(sent)) + sent)
            size = struct.unpack("<I", await reader.readexactly(4))[0]
            answer = msgspec.msgpack.decode(await reader.readexactly(size))
            writer.close()
            return answer

    tag, kind, message = asyncio.run(run())
    assert (tag, kind) == (1, "WorkerError")
    assert "unreadable request" in str(message)
