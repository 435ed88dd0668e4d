"""Time the phases of a run's start, and print the current one every few seconds."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

from rl_protocol.support.host.process_watch import age_of

EVERY_S = 4.0
"""Seconds between two lines."""


def command_age() -> float:
    """Seconds since the command of this process was given: its start, or that of its `uv run`."""
    parent = psutil.Process().parent()
    return age_of(parent.pid if parent and parent.name() == "uv" else os.getpid()) or 0.0


@dataclass(eq=False, slots=True)
class _Phase:
    what: str
    began: float


class Startup:
    """Times phases and reports the current one from a thread, also while the caller is blocked.

    Args:
        say: prints a line.
        every_s: seconds between two lines.
        before_s: seconds since the command was given, the phase `process`; None: the start is the
            call of train().
        when_done: called at the end of the start.

    Lifecycle: `phase` or `begin` as often as needed; `end` after the last one. Safe to end twice.

    Example:
        startup = Startup(print)
        with startup.phase("ray", "starting Ray"):
            ray.init()
        startup.end()
        startup.metrics()   # {"startup_s/ray": 2.1, "startup_s/total": 2.1}
    """

    def __init__(
        self,
        say: Callable[[str], None],
        every_s: float = EVERY_S,
        *,
        before_s: float | None = None,
        when_done: Callable[[], None] | None = None,
    ) -> None:
        self._say = say
        self._when_done = when_done
        self._every_s = every_s
        self._start = time.perf_counter() - (before_s or 0.0)
        self._seconds: dict[str, float] = {} if before_s is None else {"process": before_s}
        self._total: float | None = None
        self._running: list[_Phase] = []
        self.phases: list[tuple[str, float, float]] = []
        """(name, Unix time of its begin, of its end) of each phase that is over."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._report, name="startup", daemon=True)
        self._thread.start()

    @contextmanager
    def phase(self, name: str, what: str) -> Generator[None]:
        """Time a phase; `what` is the text of its lines. Phases may overlap."""
        phase, began = self.begin(what), time.time()
        try:
            yield
        finally:
            self._running.remove(phase)
            self.phases.append((name, began, time.time()))
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - phase.began

    def begin(self, what: str) -> _Phase:
        """Name the phase that starts now."""
        phase = _Phase(what, time.perf_counter())
        self._running.append(phase)
        return phase

    def describe(self, what: str) -> None:
        """Change the text of the newest phase without restarting its time."""
        self._running[-1].what = what

    def done(self) -> None:
        """End the start: later phases do not count in the total."""
        self._total = time.perf_counter() - self._start
        if self._when_done is not None:
            self._when_done()

    def end(self) -> None:
        """Stop reporting."""
        self._ended.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def metrics(self) -> dict[str, float]:
        """Seconds of each phase and of the whole start."""
        total = time.perf_counter() - self._start if self._total is None else self._total
        return {f"startup_s/{name}": seconds for name, seconds in self._seconds.items()} | {"startup_s/total": total}

    def first_step(self) -> tuple[dict[str, float], str]:
        """The metric of the first training step, which has ended now, and a line of all phases."""
        seconds = time.perf_counter() - self._start
        phases = ", ".join(f"{name} {duration:.1f}" for name, duration in self._seconds.items())
        return {"startup_s/first_step": seconds}, f"start: first step done after {seconds:.1f} s ({phases})"

    def _report(self) -> None:
        while not self._ended.wait(self._every_s):
            for phase in self._running[-1:]:
                self._say(f"  {phase.what} ({time.perf_counter() - phase.began:.0f} s)")
