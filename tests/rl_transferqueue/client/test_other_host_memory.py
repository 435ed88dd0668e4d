"""`RemoteMemory` against the bulk server of a unit, without a plane."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from network_helpers import NO_KEY, rows_of, running
from polling import until

from rl_protocol.support.host_identity import this_host
from rl_protocol.wire import plan
from rl_transferqueue.client.other_host_memory import RemoteMemory
from rl_transferqueue.transport.bulk_server import BulkServer
from rl_transferqueue.transport.event_loop import Reactor
from rl_transferqueue.wire.descriptor import UnitAddress
from rl_transferqueue.wire.process_liveness import this_process
from rl_transferqueue.wire.spans import Span

NBYTES = 64


def test_a_transfer_that_is_cancelled_at_its_end_breaks_no_connection_of_others() -> None:
    arena = bytearray(2 * NBYTES)
    reactor = Reactor()
    server = BulkServer(reactor, "127.0.0.1", NO_KEY, memoryview(arena))
    unit = UnitAddress("", this_process(), -1, len(arena), bulk=f"127.0.0.1:{server.port}", host=this_host())

    async def write(memory: RemoteMemory, place: int, value: int) -> None:
        batch = rows_of(value, NBYTES)
        await memory.write(Span(0, place * NBYTES, NBYTES), plan(batch), batch, 60.0)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        memory = RemoteMemory({0: unit}, NO_KEY, b"session1", lambda _: None)
        exchange: Callable[..., Any] = memory._exchange

        def exchange_and_cancel(number: int, talk: Any, transfer: Any, timeout_s: float) -> Any:
            memory._exchange = exchange  # type: ignore[method-assign]
            result = exchange(number, talk, transfer, timeout_s)
            loop.call_soon_threadsafe(first.cancel)
            until(lambda: transfer._ended, "the cancelled call ends the transfer")
            return result

        memory._exchange = exchange_and_cancel  # type: ignore[method-assign]
        first = asyncio.create_task(write(memory, 0, 1))
        with pytest.raises(asyncio.CancelledError):
            await first
        await write(memory, 1, 2)
        memory.close()

    with running(reactor):
        asyncio.run(main())
    server.close()
    assert arena == bytes([1] * NBYTES + [2] * NBYTES)
