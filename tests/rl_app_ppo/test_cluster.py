"""Workers in real Ray processes: what happens when one stops answering."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import psutil
import pytest

from rl_app_ppo.main import RAY_SETTINGS
from rl_app_ppo.runtime.cluster import RayWorker, ray_session
from rl_app_ppo.schema import RayConfig, TrainerConfig
from rl_protocol import WorkerError


def processes() -> set[int]:
    """Those of our worker processes."""
    children = psutil.Process().children(recursive=True)
    return {child.pid for child in children if "WorkerProcess" in " ".join(child.cmdline())}


async def answers(worker: RayWorker) -> None:
    """A worker that was not built yet says so: an answer that needs no model."""
    with pytest.raises(WorkerError, match="called before build"):
        await worker.call("reward", b"", timeout_s=60)


@pytest.mark.slow
def test_a_worker_that_hangs_is_named_at_its_deadline_and_stops_nobody_else(tmp_path, monkeypatch):
    """As a reward function does that never returns: its process gets no further, for whatever reason."""
    for name, value in RAY_SETTINGS.items():
        monkeypatch.setenv(name, value)

    async def body() -> None:
        async with ray_session(RayConfig(), TrainerConfig()):
            stuck = RayWorker("reward", "stuck", tmp_path / "stuck.log", 1)
            await answers(stuck)
            (pid,) = processes()
            other = RayWorker("reward", "other", tmp_path / "other.log", 1)
            await answers(other)
            os.kill(pid, signal.SIGSTOP)
            try:
                start = time.monotonic()
                hanging = asyncio.create_task(stuck.call("reward", b"", timeout_s=3))
                await answers(other)
                assert not hanging.done()
                with pytest.raises(WorkerError, match=r"Worker stuck did not answer reward within 3 s; .*stuck\.log"):
                    await hanging
                assert 3 <= time.monotonic() - start < 30
                await answers(other)
            finally:
                os.kill(pid, signal.SIGCONT)
            await answers(stuck)

    asyncio.run(body())
