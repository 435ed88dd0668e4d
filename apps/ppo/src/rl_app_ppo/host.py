"""Inside a worker process: builds the worker of its role and answers calls. Knows no Ray."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections.abc import AsyncIterator, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from rl_app_ppo.runtime.messages import BuildCall, Role, WarmupProgress, WeightCall
from rl_app_ppo.wiring.weights import WeightEnd, answer, require_admission
from rl_protocol import WorkerError
from rl_trainer import Worker

if TYPE_CHECKING:
    from rl_app_ppo.wiring.tracing import Trace


class Host:
    """One worker with its models, its data plane client and its end of the weight synchronisation.

    Lifecycle: made with the process; `build` loads everything; then handlers of the worker and `weights.*` are called.
    """

    def __init__(self, role: Role, name: str, log_path: Path, threads: int) -> None:
        self._role: Role = role
        self._threads = threads
        self._worker: Worker | None = None
        self._weights: WeightEnd | None = None
        self._trace: Trace | None = None
        handler = logging.FileHandler(log_path)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.getLogger().addHandler(handler)
        logging.getLogger().setLevel(logging.INFO)
        logging.captureWarnings(capture=True)
        logging.getLogger(__name__).info("worker %s starts as %s, process %d", name, role, os.getpid())
        if role != "reward":
            with uncollected():
                from rl_app_ppo.wiring import models  # torch and transformers: the reward process does without them

            models.configure(threads)

    async def call(self, method: str, payload: bytes) -> bytes:
        """Answer one call.

        Raises:
            RLError: whatever the handler raised.
            WorkerError: no such method, or not built yet.
        """
        if method == "build":
            return await self._build(msgspec.msgpack.decode(payload, type=BuildCall))
        if method.startswith("profile."):
            return self._profile(method, Path(payload.decode()))
        if method.startswith("weights."):
            message = msgspec.msgpack.decode(payload, type=WeightCall)
            return await answer(self._weights, method.removeprefix("weights."), message)
        if self._worker is None:
            raise WorkerError(f"{method!r} was called before build.")
        require_admission(self._weights, method)
        return await self._worker.handle(method, payload)

    async def warm_up(self, config: str) -> AsyncIterator[WarmupProgress]:
        """Make the demo model, or find it in the cache, and tell about it; the last item carries its path."""
        from rl_app_ppo.wiring import models

        queue: asyncio.Queue[WarmupProgress] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def report(step: int, total: int, loss: float) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, WarmupProgress(step=step, total=total, loss=loss))

        work = asyncio.create_task(asyncio.to_thread(models.demo_model, config, report))
        while not work.done() or not queue.empty():
            getter = asyncio.create_task(queue.get())
            await asyncio.wait({getter, work}, return_when=asyncio.FIRST_COMPLETED)
            if getter.done():
                yield getter.result()
            else:
                getter.cancel()
        yield WarmupProgress(path=str(work.result()))

    def _profile(self, method: str, path: Path) -> bytes:
        """Begin a trace, or write it to `path`."""
        from rl_app_ppo.wiring.tracing import Trace

        if method == "profile.begin":
            self._trace = Trace()
        elif self._trace is not None:
            trace, self._trace = self._trace, None
            trace.write(path)
        return b""

    async def _build(self, call: BuildCall) -> bytes:
        with uncollected():
            from rl_app_ppo.wiring import roles

            self._worker, self._weights = await roles.build(self._role, call)
        return b""


@contextmanager
def uncollected() -> Generator[None]:
    """Within, nothing is searched for garbage: importing torch and transformers makes hardly any, and the search is a sixth of its time.

    What is there at the end is not searched later, either.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
