"""Wait for a condition that another task, thread or process makes true."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable


async def until_async(condition: Callable[[], Awaitable[bool]], what: str, seconds: float = 60.0) -> None:
    """Return when `condition` is true; fail, naming `what`, after so many seconds."""
    deadline = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.02)


def until(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Return when `condition` is true; fail, naming `what`, after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)
