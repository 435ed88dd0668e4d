"""Runs with the stand-in for the model: started, struck, started again, and counted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rl_app_ppo.chaos.events import Event, read_events
from rl_app_ppo.chaos.judge import Outcome, count
from rl_app_ppo.chaos.plane_workers import read_state
from rl_app_ppo.chaos.processes import MARK, POLL_S, describe, marked, send, shared_memory, strike, wait_until
from rl_app_ppo.chaos.schedule import Schedule, Strike, Victim
from rl_app_ppo.chaos.stand_in import ActorState, PlaneRun, expected
from rl_protocol.support.fault_points import ARMED, armed_for
from rl_trainer.checkpoints.checkpoint_folder import newest_whole

_START_S = 90.0
"""Longest time from a start of a run to its end."""
_GONE_S = 30.0
"""Longest time in which all processes end once the driver has ended."""
_MOST_STARTS = 8
_START = ("process", "begin", "end")
"""Events that a run without faults writes once; the moments of strikes do not count them."""


class PlaneRunner:
    """One run in a folder of its own.

    Args:
        schedule: its faults.
        folder: empty.
    """

    def __init__(self, schedule: Schedule, folder: Path) -> None:
        self._schedule = schedule
        self._run = PlaneRun(folder=str(folder), max_staleness=schedule.max_staleness)
        self._folder = folder
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
            if code and self._struck == before and not hung:
                self._failure = f"start {starts} failed without a fault, status {code}: {self._tail()}"
        if starts == _MOST_STARTS and code:
            self._failure = f"it failed {starts} times: {self._tail()}"
        left = self._left(memory)
        counted = count(self._events(), self._final(), expected(self._run))
        if not self._failure and not hung and counted.weights_differ:
            self._failure = "the final weights differ from those of a run without faults"
        return Outcome(
            kind="plane",
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
        command = [sys.executable, "-m", "rl_app_ppo.chaos.plane_driver", msgspec.json.encode(self._run).decode()]
        environment = {**os.environ, **self._armed(), MARK: self._mark, "TMPDIR": str(self._temporary)}
        with self._log.open("ab") as log:
            driver = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        deadline = time.monotonic() + _START_S
        while driver.poll() is None and time.monotonic() < deadline:
            if self._strikes and self._due(self._strikes[0]):
                self._hit(self._strikes.pop(0))
            time.sleep(POLL_S)
        self._struck += environment.get(ARMED) is not None and self._reached.exists()
        ended = driver.poll() is not None and wait_until(lambda: not marked(self._mark), _GONE_S)
        if not ended:
            self._end()
            driver.wait()
        return driver.returncode if ended else None

    def _armed(self) -> dict[str, str]:
        """Environment of the next start: the first one has the point of the schedule."""
        if not self._strikes or self._strikes[0].point is None:
            return {}
        planned = self._strikes.pop(0)
        assert planned.point is not None
        return armed_for(planned.point, planned.passes, self._reached)

    def _due(self, planned: Strike) -> bool:
        return sum(event.kind not in _START for event in self._events()) >= planned.event

    def _hit(self, planned: Strike) -> None:
        time.sleep(planned.after_s)
        pids = marked(self._mark) if planned.victim is Victim.ALL else self._pids(planned)
        self._struck += bool(strike(pids, planned.fault, planned.seconds))

    def _pids(self, planned: Strike) -> list[int]:
        """The newest process of the kind, as a list."""
        newest = {event.name: event.number for event in self._events() if event.kind == "process"}
        names = sorted(name for name in newest if name.partition("-")[0] == planned.victim)
        return [newest[names[planned.which % len(names)]]] if names else []

    def _left(self, memory: set[str]) -> tuple[str, ...]:
        """What the run has left behind; ends what still runs."""
        files = [str(path) for path in (*self._temporary.iterdir(), self._run.journal) if path.exists()]
        files += [f"/dev/shm/{name}" for name in sorted(shared_memory() - memory)]
        return (*map(describe, marked(self._mark)), *files, *self._unfinished())

    def _unfinished(self) -> Sequence[str]:
        """Checkpoints that were never published."""
        return [str(path) for path in self._run.checkpoints.glob(".*")]

    def _end(self) -> None:
        """Kill what is left of a hung run."""
        for pid in marked(self._mark):
            send(pid, signal.SIGKILL)

    def _events(self) -> list[Event]:
        return read_events(self._run.events_file)

    def _final(self) -> ActorState | None:
        found, _ = newest_whole(self._run.checkpoints)
        return read_state(found.folder / "actor") if found is not None else None

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-600:].strip()
