"""The driver's end of a worker process: what happens when the process stops answering."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest

from rl_app_ppo.runtime import cluster
from rl_app_ppo.runtime.cluster import RayWorker
from rl_protocol import WorkerError


class Stopped:
    """Stands for a Ray actor whose process gets no further: a reward function that never returns, a request that takes all its time."""

    @classmethod
    def options(cls, **_):
        return cls

    @classmethod
    def remote(cls, *_):
        return cls

    call = SimpleNamespace(remote=lambda *_: asyncio.get_running_loop().create_future())


def test_a_worker_that_hangs_is_named_at_its_deadline_and_stops_nobody_else(tmp_path, monkeypatch):
    """The deadline is the driver's, not a signal in the worker; until then everything else in the driver goes on."""
    monkeypatch.setattr(cluster, "WorkerProcess", Stopped)
    worker, ticks = RayWorker("reward", "judge", tmp_path / "judge.log", 1), 0

    async def body() -> None:
        nonlocal ticks
        start = time.monotonic()
        hanging = asyncio.create_task(worker.call("reward", b"rows", timeout_s=0.2))
        while not hanging.done():
            ticks += 1
            await asyncio.sleep(0.01)
        with pytest.raises(WorkerError, match=r"Worker judge did not answer reward within 0\.2 s; .*judge\.log"):
            await hanging
        assert 0.2 <= time.monotonic() - start < 30

    asyncio.run(body())
    assert ticks > 1
    assert worker.bytes_moved == len(b"rows")
