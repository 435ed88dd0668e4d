"""Time the phases of a run's start, and print the current one every few seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

EVERY_S = 4.0
"""Seconds between two lines."""


class Startup:
    """Times phases and reports the current one from a thread, also while the caller is blocked.

    Lifecycle: `phase` or `begin` as often as needed; `end` after the last one. Safe to end twice.

    Example:
        startup = Startup(print)
        with startup.phase("ray", "starting Ray"):
            ray.init()
        startup.end()
        startup.metrics()   # {"startup_s/ray": 2.1, "startup_s/total": 2.1}
    """

    def __init__(self, say: Callable[[str], None], every_s: float = EVERY_S) -> None:
        self._say = say
        self._every_s = every_s
        self._start = self._began = time.perf_counter()
        self._seconds: dict[str, float] = {}
        self._total: float | None = None
        self._what = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._report, name="startup", daemon=True)
        self._thread.start()

    @contextmanager
    def phase(self, name: str, what: str) -> Generator[None]:
        """Time a phase; `what` is the text of its lines."""
        self.begin(what)
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - self._began

    def begin(self, what: str) -> None:
        """Name the phase that starts now."""
        self._what, self._began = what, time.perf_counter()

    def describe(self, what: str) -> None:
        """Change the text of the current phase without restarting its time."""
        self._what = what

    def done(self) -> None:
        """End the start: later phases do not count in the total."""
        self._total = time.perf_counter() - self._start

    def end(self) -> None:
        """Stop reporting."""
        self._ended.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def metrics(self) -> dict[str, float]:
        """Seconds of each phase and of the whole start."""
        total = time.perf_counter() - self._start if self._total is None else self._total
        return {f"startup_s/{name}": seconds for name, seconds in self._seconds.items()} | {"startup_s/total": total}

    def _report(self) -> None:
        while not self._ended.wait(self._every_s):
            if self._what:
                self._say(f"  {self._what} ({time.perf_counter() - self._began:.0f} s)")
