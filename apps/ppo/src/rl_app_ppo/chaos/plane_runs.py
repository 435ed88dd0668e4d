"""Runs with the stand-in for the model (`runner.Subject`)."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from rl_app_ppo.chaos.events import Event, EventLog, read_events
from rl_app_ppo.chaos.judge import Counted, Kind, count
from rl_app_ppo.chaos.plane_workers import read_state
from rl_app_ppo.chaos.schedule import PLANE_CELLS, Fault, Pace
from rl_app_ppo.chaos.stand_in import PlaneRun, expected
from rl_app_ppo.chaos.strikes import flip_byte, flippable
from rl_trainer.checkpoints.checkpoint_folder import newest_whole

_START = ("process", "begin", "damaged", "dropped", "end")
"""Events that are no progress; the moments of strikes do not count them."""
PACE = Pace(events=PlaneRun(folder="").events, spread_s=0.01, passes=1.0, cells=PLANE_CELLS)


class PlaneSubject:
    """Journal, data plane, replay buffers and trainer, with stand-ins for the workers.

    Args:
        folder: of the run.
        max_staleness: see Schedule.
    """

    kind: Kind = "plane"
    start_s = 90.0

    def __init__(self, folder: Path, max_staleness: int) -> None:
        self._run = PlaneRun(folder=str(folder), max_staleness=max_staleness)

    def command(self) -> Sequence[str]:
        """Start or resume it."""
        return [sys.executable, "-m", "rl_app_ppo.chaos.plane_driver", msgspec.json.encode(self._run).decode()]

    def environment(self) -> Mapping[str, str]:
        """No further variables."""
        return {}

    def events(self) -> int:
        """Events of the log."""
        return sum(event.kind not in _START for event in self._read())

    def processes(self, mark: str) -> Mapping[str, int]:
        """The newest process of each name."""
        del mark
        return {event.name: event.number for event in self._read() if event.kind == "process"}

    def files(self, fault: Fault) -> Sequence[Path]:
        """Segments of the journal, or the newest checkpoint."""
        return flippable(fault, self._run.journal, self._run.checkpoints)

    def flip(self, fault: Fault, which: int) -> bool:
        """Change a byte, and note what is whole without it."""
        events = EventLog(self._run.events_file)
        events.write(Event(kind="saved", number=self._whole()))
        flipped = flip_byte(self.files(fault), which)
        events.write(Event(kind="damaged", number=self._whole()))
        events.close()
        return flipped

    def left(self) -> Sequence[str]:
        """The journal, and checkpoints that were never published."""
        files = [*self._run.checkpoints.glob(".*"), self._run.journal]
        return [str(path) for path in files if path.exists()]

    def count(self) -> Counted:
        """Compare it with a run without faults, which is computed."""
        found, _ = newest_whole(self._run.checkpoints)
        final = read_state(found.folder / "actor") if found is not None else None
        return count(self._read(), final, expected(self._run))

    def _whole(self) -> int:
        found, _ = newest_whole(self._run.checkpoints)
        return found.manifest.step if found is not None else 0

    def _read(self) -> list[Event]:
        return read_events(self._run.events_file)
