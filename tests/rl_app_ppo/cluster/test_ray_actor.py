"""The driver's handle of a worker process when the process stops answering."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest

from rl_app_ppo.cluster import ray_actor
from rl_app_ppo.cluster.ray_actor import RayProcess, RayWorker
from rl_protocol import WorkerError


class Stopped:
    """A Ray actor that never answers, as with a reward function that never returns."""

    @classmethod
    def options(cls, **_):
        return cls

    @classmethod
    def remote(cls, *_):
        return cls

    call = SimpleNamespace(remote=lambda *_: asyncio.get_running_loop().create_future())


def test_a_worker_that_hangs_is_named_at_its_deadline_and_blocks_no_other(tmp_path, monkeypatch):
    """The driver enforces the deadline, without a signal in the worker; its other tasks run on."""
    monkeypatch.setattr(ray_actor, "_actor_class", Stopped)
    process = RayProcess(["reward"], "judge", tmp_path / "judge.log", 1)
    worker, ticks = RayWorker(process, "reward", "judge"), 0

    async def body() -> None:
        nonlocal ticks
        start = time.monotonic()
        hanging = asyncio.create_task(worker.call("reward", b"rows", timeout_s=0.2))
        while not hanging.done():
            ticks += 1
            await asyncio.sleep(0.01)
        with pytest.raises(WorkerError, match=r"Worker judge did not answer reward within 0\.2 s; .*judge\.log"):
            await hanging
        assert time.monotonic() - start > 0.19

    asyncio.run(body())
    assert ticks > 1
    assert worker.bytes_moved == len(b"rows")
