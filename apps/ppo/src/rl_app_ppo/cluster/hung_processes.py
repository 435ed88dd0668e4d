"""Why the run itself has killed processes, for the errors that follow."""

from __future__ import annotations

from rl_app_ppo.cluster.heartbeats import OtherHost, Watched


class HungProcesses:
    """Processes that were killed because their heartbeats stood still.

    >>> from pathlib import Path
    >>> hung = HungProcesses()
    >>> hung.add(Watched("Worker actor", 7, Path("beat")), 5.0)
    >>> hung.end_of(7), hung.end_of(8)
    ('hung for 5 s (restart.heartbeat_s) and was therefore killed', '')
    """

    def __init__(self) -> None:
        self._ends: dict[tuple[OtherHost | None, int], str] = {}
        self._names: dict[str, str] = {}

    def add(self, process: Watched, still_s: float) -> None:
        """The process is killed now, after so many seconds without a beat."""
        end = f"hung for {still_s:g} s (restart.heartbeat_s) and was therefore killed"
        self._ends[process.host, process.pid] = self._names[process.name] = end

    def discard(self, process: Watched) -> None:
        """The process had ended by itself."""
        self._ends.pop((process.host, process.pid), None)
        self._names.pop(process.name, None)

    def end_of(self, pid: int, host: OtherHost | None = None) -> str:
        """How a process of a host (None: the driver's) ended; empty: it was not killed."""
        return self._ends.get((host, pid), "")

    def end_by_name(self, name: str) -> str:
        """The same, of a process that is never replaced."""
        return self._names.get(name, "")
