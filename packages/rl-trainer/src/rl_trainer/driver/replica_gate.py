"""Who may use the rollout replicas: permits for prompts, and a gate for weight updates."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from rl_trainer.asyncio_tasks import deadline


class Permits:
    """A number of permits; the lowest turn that waits gets the next one.

    Args:
        count: how many there are.
        timeout_s: longest time of each wait.
    """

    def __init__(self, count: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._free = count
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    async def acquire(self, turn: int) -> None:
        """Wait for a permit; equal turns are served in the order of their calls.

        Raises:
            HangError: there is none within `timeout_s`.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (turn, next(self._numbers), future))
        self._hand_out()
        try:
            async with deadline(self._timeout_s, "a permit to generate"):
                await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():  # it was handed over in the same turn of the event loop
                self.release()
            raise

    def release(self) -> None:
        """Give a permit back."""
        self._free += 1
        self._hand_out()

    def _hand_out(self) -> None:
        while self._free and self._waiting:
            *_, future = heapq.heappop(self._waiting)
            if not future.done():
                self._free -= 1
                future.set_result(None)


class ReplicaGate:
    """Keeps calls that generate and weight updates apart.

    Calls that generate run side by side, and new ones wait for an update. The update waits for
    those that run, unless the replicas can change weights below them.

    Args:
        timeout_s: longest time of each wait.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._running = 0
        self._idle, self._open = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._open.set()

    async def enter(self) -> None:
        """Wait until a call may generate; it then must `leave`.

        Raises:
            HangError: it may not within `timeout_s`.
        """
        async with deadline(self._timeout_s, "the end of a weight update"):
            while not self._open.is_set():
                await self._open.wait()
        self._running += 1
        self._idle.clear()

    def leave(self) -> None:
        """A call that entered has ended."""
        self._running -= 1
        if not self._running:
            self._idle.set()

    @asynccontextmanager
    async def closed(self, *, drain: bool = True) -> AsyncGenerator[None]:
        """Let no call enter until the context ends; with `drain`, first wait until none runs.

        Raises:
            HangError: something is after `timeout_s`.
        """
        assert self._open.is_set(), "one weight update at a time"
        self._open.clear()
        try:
            if drain:
                async with deadline(self._timeout_s, "the running generation, before a weight update"):
                    await self._idle.wait()
            yield
        finally:
            self._open.set()
