"""The plane that most tests share, and the import paths of the helper modules."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from polling import until_async

from rl_transferqueue import Client, LocalPlane, PlaneDescriptor, TransferQueueConfig, connect, start_local_plane

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "client"), str(HERE / "journal"), str(HERE / "scenarios" / "compat")]


@pytest.fixture(autouse=True)
def server_grace_s(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let clients wait 60 s instead of 1 s for the server's own answer to a call that timed out.

    On a busy machine 1 s may pass first, and the client's own error says less. Returns a function
    that sets another number of seconds, for tests whose server does not answer.
    """

    def set_grace(seconds: float) -> None:
        for module in ("client", "reader", "writer"):
            monkeypatch.setattr(f"rl_transferqueue.client.{module}.SERVER_GRACE_S", seconds)

    set_grace(60.0)
    return set_grace


@pytest.fixture(scope="session")
def shared_plane() -> Iterator[LocalPlane]:
    with start_local_plane(TransferQueueConfig(capacity_mb=32, segment_mb=1)) as plane:
        yield plane


@pytest.fixture
def plane(shared_plane: LocalPlane) -> Iterator[LocalPlane]:
    """Yield the shared plane, which is empty.

    After the test, clear the plane and check that all of its memory is free again.
    """
    yield shared_plane
    asyncio.run(_sweep(shared_plane.descriptor))


async def _sweep(descriptor: PlaneDescriptor) -> None:
    async with await connect(descriptor) as client:
        for partition in (await client.stats()).rows:
            await client.clear(partition)
        await until_async(lambda: _empty(client), "the plane gives all memory back")


async def _empty(client: Client) -> bool:
    return (await client.stats()).bytes_used == 0
