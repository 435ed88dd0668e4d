"""The start of the processes of a run, with a stand-in for Ray and for the data plane."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl_app_ppo.config.loading import load_config
from rl_app_ppo.driver import processes
from rl_app_ppo.driver.processes import start_processes
from rl_app_ppo.outputs.startup_times import Startup
from rl_protocol import PlaneLostError, WorkerError


class Start:
    """A start of Ray that ends with `ray`, and one of the data plane that fails after that."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ray: BaseException | None) -> None:
        self.begun = asyncio.Event()
        self._ray_ended = asyncio.Event()
        self._ray = ray
        monkeypatch.setattr(processes, "ray_session", self._ray_session)
        monkeypatch.setattr(processes, "_local_plane", self._local_plane)

    async def run(self) -> None:
        plan: Any = SimpleNamespace(config=load_config([]), files=None, fork_server=None)
        async with AsyncExitStack() as stack:
            await start_processes(plan, stack, SimpleNamespace(), Startup(lambda _: None))  # pyright: ignore[reportArgumentType]

    @asynccontextmanager
    async def _ray_session(self, *_: object) -> AsyncGenerator[None]:
        self.begun.set()
        try:
            await asyncio.sleep(0 if self._ray else 60)
            if self._ray is not None:
                raise self._ray
            yield
        finally:
            self._ray_ended.set()

    @asynccontextmanager
    async def _local_plane(self, *_: object) -> AsyncGenerator[Path]:
        await self._ray_ended.wait()
        raise PlaneLostError("The controller process of the data plane ended with status -2 before it was up.")
        yield


def test_an_interrupt_that_also_ends_the_data_plane_is_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C reaches the processes of a terminal, also a server that is just being started."""

    async def main() -> None:
        start = Start(monkeypatch, ray=None)
        running = asyncio.create_task(start.run())
        await start.begun.wait()
        running.cancel()
        await running

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())


def test_an_error_of_ray_is_raised_before_one_of_the_data_plane(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        await Start(monkeypatch, ray=WorkerError("Ray did not start")).run()

    with pytest.raises(WorkerError, match="Ray did not start"):
        asyncio.run(main())
