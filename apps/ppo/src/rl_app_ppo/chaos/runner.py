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
from rl_app_ppo.chaos.processes import MARK, POLL_S, describe, marked, send, shared_memory, strike, wait_until
from rl_app_ppo.chaos.schedule import Schedule, Strike, Victim
from rl_protocol.support.fault_points import ARMED, armed_for

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
        self._strikes = list(schedule.strikes)
        self._struck = 0
        self._failure = ""

    def run(self) -> Outcome:
        """Start the run until it ends by itself, and count what it has done."""
        began, memory = time.monotonic(), shared_memory()
        self._temporary.mkdir(parents=True)
        starts, code, hung = 0, None, False
        while code != 0 and not hung and not self._failure and starts < _MOST_STARTS:
            starts += 1
            before = self._struck
            code = self._start()
            hung = code is None
            if code and self._struck == before:
                self._failure = f"start {starts} failed without a fault, status {code}: {self._tail()}"
        left = self._left(memory)
        counted = self._subject.count()
        if not self._failure and not hung and counted.weights_differ:
            self._failure = "the final weights differ from those of a run without faults"
        return Outcome(
            kind=self._subject.kind,
            schedule=self._schedule,
            struck=self._struck,
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
        environment = {**os.environ, **self._subject.environment(), **self._armed(), MARK: self._mark}
        environment["TMPDIR"] = str(self._temporary)
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
            if self._strikes and self._subject.events() >= self._strikes[0].event:
                self._hit(self._strikes.pop(0))
            time.sleep(POLL_S)
        self._struck += ARMED in environment and self._reached.exists()
        ended = driver.poll() is not None and wait_until(lambda: not marked(self._mark), _GONE_S)
        if not ended:
            for pid in marked(self._mark):
                send(pid, signal.SIGKILL)
            driver.wait()
        return driver.returncode if ended else None

    def _armed(self) -> dict[str, str]:
        """Environment of the next start: the first one has the point of the schedule."""
        if not self._strikes or self._strikes[0].point is None:
            return {}
        planned = self._strikes.pop(0)
        assert planned.point is not None
        return armed_for(planned.point, planned.passes, self._reached)

    def _hit(self, planned: Strike) -> None:
        time.sleep(planned.after_s)
        if planned.victim is Victim.ALL:
            pids = marked(self._mark)
        else:
            running = self._subject.processes(self._mark)
            names = sorted(name for name in running if name.partition("-")[0] == planned.victim)
            pids = [running[names[planned.which % len(names)]]] if names else []
        self._struck += bool(strike(pids, planned.fault, planned.seconds))

    def _left(self, memory: set[str]) -> tuple[str, ...]:
        """What the run has left behind."""
        files = [*map(str, self._temporary.glob("rl-*")), *self._subject.left()]
        files += [f"/dev/shm/{name}" for name in sorted(shared_memory() - memory)]
        return (*map(describe, marked(self._mark)), *files)

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-600:].strip()
