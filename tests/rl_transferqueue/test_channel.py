"""Answers that cross with cancellations and deadlines are never lost."""

from __future__ import annotations

import asyncio
import socket

import pytest

from rl_protocol import PlaneTimeout
from rl_transferqueue.channel import Channel
from rl_transferqueue.links import UnixLink
from rl_transferqueue.messages import Cleared, Reply, WaitReady

NEVER = WaitReady("never", 1, (), {}, None, 60.0)


@pytest.mark.parametrize("when", ["before the cancel", "before the caller is told", "after the caller is told"])
@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_an_answer_to_a_caller_that_left_goes_to_its_orphan(how: str, when: str) -> None:
    async def main() -> None:
        here, nobody = socket.socketpair(socket.AF_UNIX)  # every answer is the test's own
        channel = Channel(asyncio.get_running_loop(), UnixLink(here), "controller")
        orphans: list[Cleared] = []
        call = channel.start(NEVER)
        answer = Reply(call.id, Cleared(7))
        task = asyncio.ensure_future(channel.finish(call, Cleared, 60, orphan=orphans.append))
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
        if isinstance(done, Cleared):
            assert (how, when, done.count) == ("deadline", "before the cancel", 7)
        else:
            assert isinstance(done, asyncio.CancelledError if how == "cancel" else PlaneTimeout)
            assert [orphan.count for orphan in orphans] == [7]
        channel.close()
        nobody.close()

    asyncio.run(main())
