"""An answer that fails, or races with a cancellation or a deadline, is returned or reported as not
taken."""

from __future__ import annotations

import asyncio
import socket

import msgspec
import pytest

from rl_protocol import BatchError, PlaneTimeout
from rl_transferqueue.transport.control_client import ControlClient
from rl_transferqueue.transport.unix_link import Frames, UnixLink
from rl_transferqueue.wire.messages import Cancel, Cleared, Failure, GetStats, Reply, Request, WaitReady

NEVER = WaitReady("never", 1, (), {}, None, 60.0)


@pytest.mark.parametrize("when", ["before the cancel", "before the caller is told", "after the caller is told"])
@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_a_caller_has_its_answer_or_the_server_is_told_that_it_left(how: str, when: str) -> None:
    async def main() -> None:
        here, server = socket.socketpair(socket.AF_UNIX)  # the test itself sends the answers
        channel = ControlClient(asyncio.get_running_loop(), UnixLink(here), "controller")
        call = channel.start(NEVER)
        answer = Reply(call.id, Cleared(7))
        task = asyncio.ensure_future(channel.finish(call, Cleared, 60, takes=True))
        await asyncio.sleep(0)
        if when == "before the cancel":
            channel._take(answer)
        if how == "cancel":
            task.cancel()
        elif not call.answer.done():
            call.answer.set_result(None)
        if when == "before the caller is told":
            channel._take(answer)
        done = (await asyncio.gather(task, return_exceptions=True))[0]
        if when == "after the caller is told":
            channel._take(answer)
        channel.tell(GetStats())
        _, *said = (msgspec.msgpack.decode(frame, type=Request) for frame in Frames().feed(server.recv(4096)))
        if isinstance(done, Cleared):
            assert (how, when, done.count) == ("deadline", "before the cancel", 7)
            assert [(type(one.body), one.received) for one in said] == [(GetStats, (call.id,))]
        else:
            assert isinstance(done, asyncio.CancelledError if how == "cancel" else PlaneTimeout)
            assert [(one.body, one.received) for one in said] == [(Cancel(call.id), ()), (GetStats(), ())]
        channel.close()
        server.close()

    asyncio.run(main())


@pytest.mark.parametrize("takes", [True, False])
def test_a_call_that_fails_gives_back_what_it_may_have_taken(takes: bool) -> None:
    async def main() -> None:
        here, server = socket.socketpair(socket.AF_UNIX)
        channel = ControlClient(asyncio.get_running_loop(), UnixLink(here), "controller")
        call = channel.start(NEVER)
        channel._take(Reply(call.id, Failure("BatchError", "too long")))
        with pytest.raises(BatchError, match="too long"):
            await channel.finish(call, Cleared, 60, takes=takes)
        channel.tell(GetStats())
        _, *said = (msgspec.msgpack.decode(frame, type=Request) for frame in Frames().feed(server.recv(4096)))
        assert [(one.body, one.received) for one in said] == [(Cancel(call.id), ())] * takes + [(GetStats(), ())]
        channel.close()
        server.close()

    asyncio.run(main())
