"""Notice when a process of the plane ends."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

CONTROLLER = "controller"


class ServerWatch:
    """Watches the controller and the storage units of a plane, on one event loop.

    Each has a file descriptor that becomes readable when the process ends: a pidfd, or an idle
    connection to another host.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_end: Callable[[str, int | None], None]) -> None:
        self._loop = loop
        self._on_end = on_end
        self._running: dict[str, int] = {}

    def add(self, name: str, lifeline: int, unit: int | None = None) -> None:
        """Watch a process; `on_end(name, unit)` is called when it ends. Closes `lifeline` then."""
        self._running[name] = lifeline
        self._loop.add_reader(lifeline, self._ended, name, unit)

    @property
    def any_unit_runs(self) -> bool:
        """Whether a storage unit runs."""
        return any(name != CONTROLLER for name in self._running)

    @property
    def plane_runs(self) -> bool:
        """Whether the controller and at least one storage unit run."""
        return CONTROLLER in self._running and self.any_unit_runs

    def runs(self, name: str) -> bool:
        """Whether a process is watched and has not ended."""
        return name in self._running

    def forget(self, name: str) -> None:
        """Stop watching a process, if it is watched."""
        if name in self._running:
            self._remove(name)

    def close(self) -> None:
        """Stop watching."""
        for name in list(self._running):
            self._remove(name)

    def _ended(self, name: str, unit: int | None) -> None:
        self._remove(name)
        self._on_end(name, unit)

    def _remove(self, name: str) -> None:
        lifeline = self._running.pop(name)
        self._loop.remove_reader(lifeline)
        os.close(lifeline)
