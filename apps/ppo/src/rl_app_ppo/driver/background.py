"""Runs a coroutine while a `with` block runs, and cancels it at its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager, suppress


@asynccontextmanager
async def running(work: Coroutine[object, object, None]) -> AsyncGenerator[None]:
    """Run `work` as a task while the block runs; then cancel it and wait for its end.

    An error of `work` is raised at the end of the block.
    """
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
