"""A plane for the tests that leave it alive; helper modules of this folder become importable under pytest's importlib mode."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from rl_transferqueue import Client, LocalPlane, PlaneDescriptor, TransferQueueConfig, connect, start_local_plane

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def shared_plane() -> Iterator[LocalPlane]:
    with start_local_plane(TransferQueueConfig(capacity_mb=32, segment_mb=1)) as plane:
        yield plane


@pytest.fixture
def plane(shared_plane: LocalPlane) -> Iterator[LocalPlane]:
    """The shared plane, empty; what a test leaves behind is cleared, and it is checked that all memory comes back."""
    yield shared_plane
    asyncio.run(_sweep(shared_plane.descriptor))


async def _sweep(descriptor: PlaneDescriptor) -> None:
    async with await connect(descriptor) as client:
        for partition in (await client.stats()).rows:
            await client.clear(partition)
        await until_async(lambda: _empty(client), "the plane gives all memory back")


async def _empty(client: Client) -> bool:
    return (await client.stats()).bytes_used == 0


async def until_async(condition: Callable[[], Awaitable[bool]], what: str, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.02)
