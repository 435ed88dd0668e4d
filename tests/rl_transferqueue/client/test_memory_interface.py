"""Copies in a thread end before the call that began them, however often it is cancelled."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest

from rl_transferqueue.client.memory_interface import copying

LARGE = 1 << 30


@pytest.mark.parametrize("cancellations", [1, 2, 3])
def test_a_call_that_is_cancelled_ends_after_its_copy(cancellations: int) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def copy() -> None:
        begun.set()
        assert may_end.wait(60)
        raise ValueError("nobody hears of it")

    async def main() -> None:
        logged: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
        call = asyncio.create_task(copying(LARGE, copy))
        await asyncio.to_thread(begun.wait, 60)
        for _ in range(cancellations):
            call.cancel()
            await asyncio.wait((call,), timeout=0)
            await asyncio.sleep(0)
        early = call.done()
        may_end.set()
        assert not early
        with pytest.raises(asyncio.CancelledError):
            await call
        del call
        gc.collect()
        assert logged == []

    asyncio.run(main())


def test_a_copy_returns_its_result_and_raises_its_error() -> None:
    def fail() -> None:
        raise ValueError("no")

    async def main() -> None:
        assert await copying(LARGE, lambda: 7) == 7
        with pytest.raises(ValueError, match="no"):
            await copying(LARGE, fail)

    asyncio.run(main())
