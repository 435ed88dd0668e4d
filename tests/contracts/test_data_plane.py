"""Every DataPlane of this repository passes the suite that third parties use."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from rl_protocol.ports import DataPlane
from rl_protocol.testing.data_plane_suite import DataPlaneSuite
from rl_protocol.testing.memory_data_plane import MemoryDataPlane
from rl_transferqueue import LocalPlane, TransferQueueConfig, connect, start_local_plane


class TestMemoryDataPlane(DataPlaneSuite):
    @asynccontextmanager
    async def open_plane(self) -> AsyncIterator[DataPlane]:
        yield MemoryDataPlane()


class TestLocalPlane(DataPlaneSuite):
    """One plane for all tests; checks that each test leaves it empty.

    Clients wait 60 s instead of 1 s for the server's own answer to a call that timed out, because
    on a busy machine 1 s may pass first, and the client's own error says less.
    """

    config = TransferQueueConfig(capacity_mb=64, segment_mb=1)
    plane: LocalPlane

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _plane(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with start_local_plane(cls.configure(tmp_path_factory.mktemp("plane"))) as cls.plane:
            yield

    @classmethod
    def configure(cls, folder: Path) -> TransferQueueConfig:
        del folder
        return cls.config

    @pytest.fixture(autouse=True)
    def _patient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in ("client", "reader", "writer"):
            monkeypatch.setattr(f"rl_transferqueue.client.{module}.SERVER_GRACE_S", 60.0)

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
                deadline = time.monotonic() + 60
                while (await cleaner.stats()).bytes_used:  # the end of the other client may not be known yet
                    assert time.monotonic() < deadline, "the memory did not come back"
                    await asyncio.sleep(0.02)


class TestNetworkPlane(TestLocalPlane):
    """The same without shared memory: unit and clients use two loopback addresses."""

    config = TransferQueueConfig(capacity_mb=64, segment_mb=1, listen="127.0.0.2", shared_memory=False)


class TestDurablePlane(TestLocalPlane):
    """The same with a journal."""

    @classmethod
    def configure(cls, folder: Path) -> TransferQueueConfig:
        return replace(cls.config, durability="commit", journal_dir=str(folder))


class TestMemoryBackend(TestLocalPlane):
    """The same in threads of this process."""

    config = TransferQueueConfig(backend="memory", capacity_mb=64, segment_mb=1)
