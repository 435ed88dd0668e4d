"""Calls of a worker process over a Unix socket: order, size, errors, and an end that goes away."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_app_ppo.worker.call_socket import CANCELLED, Answer, CallServer, Connection, Frames, Request, frame
from rl_protocol import RewardError

LIMIT_S = 20.0


def served(tmp_path, call, use):
    """Run `use(server, connection)` on both ends of a socket."""

    async def body():
        server, path = CallServer(call), tmp_path / "calls.sock"
        listening = await server.listen(path)
        connection = await Connection.connect(path)
        try:
            async with asyncio.timeout(LIMIT_S):
                return await use(server, connection)
        finally:
            connection.close()
            listening.close()
            await asyncio.sleep(0)  # transports close in the next turn of the loop

    return asyncio.run(body())


def test_answers_come_in_any_order_and_reach_their_callers(tmp_path):
    second_ended = asyncio.Event()

    async def call(role, method, payload):
        if method == "first":
            await second_ended.wait()
        else:
            second_ended.set()
        return f"{role} {method} ".encode() + payload[::-1]

    async def use(_, connection):
        return await asyncio.gather(
            connection.call("actor", "first", b"ab"), connection.call("reward", "second", bytes(3_000_000) + b"c")
        )

    first, second = served(tmp_path, call, use)
    assert first == Answer(1, b"actor first ba")
    assert second == Answer(2, b"reward second c" + bytes(3_000_000))


def test_a_failed_call_leaves_its_error_with_the_worker(tmp_path):
    async def call(_role, _method, payload):
        raise RewardError(payload.decode())

    async def use(server, connection):
        answers = [await connection.call("reward", "score", text) for text in (b"one", b"two")]
        return [(answer.payload, server.take_error(answer.number)) for answer in answers]

    (nothing, one), (_, two) = served(tmp_path, call, use)
    assert nothing is None
    assert [(type(error), str(error)) for error in (one, two)] == [(RewardError, "one"), (RewardError, "two")]


def test_an_abandoned_call_disturbs_no_later_one(tmp_path):
    release = asyncio.Event()

    async def call(_role, method, _payload):
        if method == "slow":
            await release.wait()
        return method.encode()

    async def use(_, connection):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await connection.call("actor", "slow", b"")
        release.set()
        return await connection.call("actor", "quick", b"")

    assert served(tmp_path, call, use) == Answer(2, b"quick")


@pytest.mark.parametrize("method", ["rollout", "update_actor"])
def test_only_generation_ends_when_its_caller_is_cancelled(tmp_path, method):
    ended, release = [], asyncio.Event()

    async def call(_role, called, _payload):
        if called == "poll":
            return b"".join(ended)
        try:
            await release.wait()
            ended.append(b"whole")
        except asyncio.CancelledError:
            ended.append(b"cancelled")
            raise
        return b""

    async def use(server, connection):
        running = asyncio.ensure_future(connection.call("rollout", method, b""))
        assert (await connection.call("rollout", "poll", b"")).payload == b""
        running.cancel()
        await asyncio.wait([running])
        while not ended:
            await connection.call("rollout", "poll", b"")
            if method not in CANCELLED:
                release.set()
        return (await connection.call("rollout", "poll", b"")).payload, server._failed

    assert served(tmp_path, call, use) == (b"cancelled" if method == "rollout" else b"whole", {})


def test_calls_end_when_the_worker_closes_the_connection(tmp_path):
    async def body():
        async def hang_up(reader, writer):
            await reader.read(1)
            writer.close()

        server = await asyncio.start_unix_server(hang_up, tmp_path / "calls.sock")
        connection = await Connection.connect(tmp_path / "calls.sock")
        async with asyncio.timeout(LIMIT_S):
            for _ in range(2):  # the second one finds the connection closed
                with pytest.raises(ConnectionResetError):
                    await connection.call("actor", "update_actor", b"")
        server.close()
        await server.wait_closed()

    asyncio.run(body())


@given(st.lists(st.binary(max_size=40), max_size=5), st.integers(1, 9))
def test_frames_survive_any_cut(payloads, size):
    sent = [Request(number, "actor", "save", payload) for number, payload in enumerate(payloads)]
    stream, frames = b"".join(map(frame, sent)), Frames()
    found = [m for at in range(0, len(stream), size) for m in frames.feed(stream[at : at + size])]
    assert found == [frame(message)[4:] for message in sent]
