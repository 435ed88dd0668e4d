"""One run: started, struck, and started again until it ends by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from rl_app_ppo.chaos.judge import Counted, Kind, Outcome
from rl_app_ppo.chaos.processes import MARK, POLL_S, describe, left_in_memory, marked, shared_memory, wait_until
from rl_app_ppo.chaos.schedule import FLIPS, Fault, Schedule, Strike, Victim
from rl_app_ppo.chaos.strikes import send, strike
from rl_protocol.support.fault_points import armed_for

_GONE_S = 30.0
"""Longest time in which all processes end once the driver has ended."""
_MOST_STARTS = 8


class Subject(Protocol):
    """What is run."""

    @property
    def kind(self) -> Kind:
        """See Outcome."""
        ...

    @property
    def start_s(self) -> float:
        """Longest time from a start to its end."""
        ...

    def command(self) -> Sequence[str]:
        """Starts it, or resumes it."""
        ...

    def environment(self) -> Mapping[str, str]:
        """Further variables."""
        ...

    def events(self) -> int:
        """How many have been written, over all starts; the moments of strikes count them."""
        ...

    def processes(self, mark: str) -> Mapping[str, int]:
        """Process ids by name, VICTIM or VICTIM-NUMBER; `mark` is the value of MARK."""
        ...

    def files(self, fault: Fault) -> Sequence[Path]:
        """Those of which the fault, one of FLIPS, changes a byte; none: it can't strike yet."""
        ...

    def flip(self, fault: Fault, which: int) -> bool:
        """Change a byte of them while no process is there; returns whether there was one."""
        ...

    def left(self) -> Sequence[str]:
        """Files of a finished run that should not be there."""
        ...

    def count(self) -> Counted:
        """Count what it has done."""
        ...


class Runner:
    """A run in a folder of its own.

    Args:
        subject: what is run.
        schedule: its faults.
        folder: of the run; made if missing.
    """

    def __init__(self, subject: Subject, schedule: Schedule, folder: Path) -> None:
        self._subject = subject
        self._schedule = schedule
        self._temporary = folder / "tmp"
        self._log = folder / "run.log"
        self._reached = folder / "reached"
        self._mark = uuid.uuid4().hex
        self._ahead = dict(enumerate(schedule.strikes))
        """By place in the schedule."""
        self._struck: list[int] = []
        self._hits = 0
        """Processes that had a fault."""
        self._failure = ""

    def run(self) -> Outcome:
        """Start the run until it ends by itself, and count what it has done."""
        began, memory = time.monotonic(), shared_memory()
        self._temporary.mkdir(parents=True)
        starts, code, hung = 0, None, False
        while code != 0 and not hung and not self._failure and starts < _MOST_STARTS:
            starts += 1
            before = self._hits
            code = self._start()
            hung = code is None
            if code and self._hits == before:
                self._failure = f"start {starts} failed without a fault, status {code}: {self._tail()}"
        left = self._left(memory)
        counted = self._subject.count()
        if not self._failure and not hung and counted.weights_differ:
            self._failure = "the final weights differ from those of a run without faults"
        return Outcome(
            kind=self._subject.kind,
            schedule=self._schedule,
            struck=tuple(self._struck),
            starts=starts,
            acknowledged=counted.acknowledged,
            trained=counted.trained,
            lost=counted.lost,
            doubled=counted.doubled,
            held=counted.held,
            went_back=counted.went_back,
            hung=hung,
            left=left,
            failure=self._failure,
            seconds=round(time.monotonic() - began, 3),
        )

    def _start(self) -> int | None:
        """Start the driver and strike; returns its status, or None if it hangs."""
        armed = self._take_armed()
        environment = {**os.environ, **self._subject.environment(), **self._armed(armed), MARK: self._mark}
        environment["TMPDIR"] = str(self._temporary)
        flips: list[int] = []
        with self._log.open("ab") as log:
            driver = subprocess.Popen(
                self._subject.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        deadline = time.monotonic() + self._subject.start_s
        while driver.poll() is None and time.monotonic() < deadline:
            if (place := self._due()) is not None:
                planned = self._ahead.pop(place)
                time.sleep(planned.after_s)
                hits = strike(self._pids(planned), planned)
                self._note(hits, place if planned.fault not in FLIPS else None)
                flips += [place] if hits and planned.fault in FLIPS else []
            time.sleep(POLL_S)
        if armed is not None:
            self._note(self._reached.exists(), armed)
        ended = driver.poll() is not None and wait_until(lambda: not marked(self._mark), _GONE_S)
        if not ended:
            for pid in marked(self._mark):
                send(pid, signal.SIGKILL)
            driver.wait()
        for place in flips:
            planned = self._schedule.strikes[place]
            self._note(self._subject.flip(planned.fault, planned.which), place)
        return driver.returncode if ended else None

    def _take_armed(self) -> int | None:
        """Place of the strike at a point, which the first start has; None: there is none."""
        place = next((place for place, planned in self._ahead.items() if planned.point is not None), None)
        if place is not None:
            del self._ahead[place]
        return place

    def _armed(self, place: int | None) -> dict[str, str]:
        planned = self._schedule.strikes[place] if place is not None else None
        if planned is None or planned.point is None:
            return {}
        flips = planned.fault in (Fault.FLIP_WEIGHTS, Fault.FLIP_MEMORY)
        return armed_for(planned.point, planned.passes, self._reached, seconds=planned.seconds, flips=flips)

    def _due(self) -> int | None:
        """The next strike, if this is its moment."""
        place = min(self._ahead, default=None)
        if place is None or self._subject.events() < self._ahead[place].event:
            return None
        fault = self._ahead[place].fault
        return place if fault not in FLIPS or self._subject.files(fault) else None

    def _note(self, hits: int, place: int | None) -> None:
        self._hits += hits
        if hits and place is not None:
            self._struck.append(place)

    def _pids(self, planned: Strike) -> Sequence[int]:
        if planned.victim is Victim.ALL and planned.fault is not Fault.FULL_DISK:
            return marked(self._mark)
        running = self._subject.processes(self._mark)
        if planned.victim is Victim.ALL:
            return list(running.values())
        names = sorted(name for name in running if name.partition("-")[0] == planned.victim)
        return [running[names[planned.which % len(names)]]] if names else []

    def _left(self, memory: set[str]) -> tuple[str, ...]:
        """What the run has left behind."""
        files = [*map(str, self._temporary.glob("rl-*")), *self._subject.left()]
        files += [f"/dev/shm/{name}" for name in sorted(left_in_memory(memory, _GONE_S))]
        return (*map(describe, marked(self._mark)), *files)

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-600:].strip()
