"""`trainer.profile_steps`: a torch trace of every process with a model, and Ray's timeline."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from rl_protocol import RLError
from rl_trainer import Hook

logger = logging.getLogger(__name__)
CLOSE_S = 60.0
"""Seconds that writing the traces may take after the last step."""


class Profiled(Protocol):
    """A worker process that can be profiled."""

    @property
    def name(self) -> str: ...

    def send(self, method: str, payload: bytes) -> Callable[[], Awaitable[bytes]]:
        """Start a call, ahead of all later ones; the returned function waits for the answer."""
        ...


class Profiling(Hook):
    """Hook that starts and ends traces without waiting for them.

    Writes `step-000002/<process>.json.gz` and `ray.json`, the timeline of the whole run, for
    chrome://tracing and Perfetto.

    Lifecycle: one of the run's hooks; `close` after training, while the processes still run. A
    trace that can't be written is logged and does not end the run.
    """

    def __init__(
        self, folder: Path, steps: frozenset[int], workers: Sequence[Profiled], timeline: Callable[[Path], None]
    ) -> None:
        self._folder = folder
        self._steps = steps
        self._workers = workers
        self._timeline = timeline
        self._sent: list[tuple[str, Callable[[], Awaitable[bytes]]]] = []

    def on_step_begin(self, step: int) -> None:
        if step in self._steps:
            self._send("profile.begin", step)

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        del metrics
        if step in self._steps:
            self._send("profile.end", step)

    async def close(self) -> None:
        """Wait until all traces are written, at most CLOSE_S seconds, and write the timeline."""
        if not self._sent:
            return
        try:
            async with asyncio.timeout(CLOSE_S):
                for what, answer in self._sent:
                    await _finished(what, answer)
                await asyncio.to_thread(self._timeline, self._folder / "ray.json")
        except TimeoutError:
            logger.warning("Not all traces were written within %g s: %s", CLOSE_S, self._folder)
        except OSError as error:
            logger.warning("The timeline can't be written: %s", error)

    def _send(self, method: str, step: int) -> None:
        for worker in self._workers:
            path = self._folder / f"step-{step:06d}" / f"{worker.name}.json.gz"
            answer = worker.send(method, str(path).encode())
            self._sent.append((f"{method} of {worker.name} in step {step}", answer))


async def _finished(what: str, answer: Callable[[], Awaitable[bytes]]) -> None:
    try:
        await answer()
    except (RLError, OSError) as error:
        logger.warning("%s failed: %s", what, error)
