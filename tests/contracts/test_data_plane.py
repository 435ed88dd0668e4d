"""Every DataPlane we ship passes the suite that third parties use."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from rl_protocol.ports import DataPlane
from rl_protocol.testing.data_plane import DataPlaneSuite
from rl_protocol.testing.fakes import MemoryDataPlane
from rl_transferqueue import LocalPlane, TransferQueueConfig, connect, start_local_plane


class TestMemoryDataPlane(DataPlaneSuite):
    @asynccontextmanager
    async def open_plane(self) -> AsyncIterator[DataPlane]:
        yield MemoryDataPlane()


class TestLocalPlane(DataPlaneSuite):
    """One plane for all tests; each leaves it empty, which is checked."""

    config = TransferQueueConfig(capacity_mb=64, segment_mb=1)
    plane: LocalPlane

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _plane(cls) -> Iterator[None]:
        with start_local_plane(cls.config) as cls.plane:
            yield

    @asynccontextmanager
    async def open_plane(self) -> AsyncIterator[DataPlane]:
        client = await connect(self.plane.descriptor)
        try:
            yield client
        finally:
            await client.close()
            async with await connect(self.plane.descriptor) as cleaner:
                for partition in (await cleaner.stats()).rows:
                    await cleaner.clear(partition)
                assert (await cleaner.stats()).bytes_used == 0


class TestNetworkPlane(TestLocalPlane):
    """The same without shared memory: unit and clients at two loopback addresses."""

    config = TransferQueueConfig(capacity_mb=64, segment_mb=1, listen="127.0.0.2", shared_memory=False)


class TestMemoryBackend(TestLocalPlane):
    """The same in threads of this process."""

    config = TransferQueueConfig(backend="memory", capacity_mb=64, segment_mb=1)
