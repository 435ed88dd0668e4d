"""Read the heartbeats of processes of this host, and kill those that hang."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from rl_protocol.support.heartbeat import read_beat

_ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


@dataclass(frozen=True)
class OtherHost:
    """A host of the run that is not the driver's.

    Attributes:
        name: its host name, which another host may have, too.
        memory: its `this_host`.
        node: Ray's id of the node.
        address: of the node.
    """

    name: str
    memory: str
    node: str
    address: str

    def __str__(self) -> str:
        return f"{self.name} (node {self.address})"


@dataclass(frozen=True)
class Watched:
    """A process with a heartbeat.

    Attributes:
        name: of the process, in messages.
        pid: its id on its host.
        file: its heartbeat there.
        host: where it runs; None: on the driver's host.
    """

    name: str
    pid: int
    file: Path
    host: OtherHost | None = None


class HostBeats:
    """The heartbeats of processes of the host that it is made on."""

    def __init__(self) -> None:
        self._known: dict[int, psutil.Process] = {}
        """The processes of the last look: a later one with the same id is not one of them."""

    def counts(self, files: Mapping[int, Path]) -> dict[int, int]:
        """The counts of processes.

        Args:
            files: process id -> its heartbeat.

        Returns:
            Process id -> its count, without processes that have ended or have no heartbeat.
        """
        known = {pid: process for pid, process in self._known.items() if pid in files}
        for pid in files:
            with suppress(psutil.NoSuchProcess):
                known.setdefault(pid, psutil.Process(pid))
        self._known = known
        counts = {pid: read_beat(files[pid]) for pid, process in known.items() if _runs(process)}
        return {pid: count for pid, count in counts.items() if count is not None}

    def kill(self, pid: int) -> bool:
        """Kill a process of the last look; returns whether it ran."""
        process = self._known[pid]
        with suppress(psutil.NoSuchProcess):  # it has just ended
            if _runs(process):
                process.kill()
                return True
        return False


def _runs(process: psutil.Process) -> bool:
    """Whether a process has not ended; one that is stopped has not."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() not in _ENDED
    return False
