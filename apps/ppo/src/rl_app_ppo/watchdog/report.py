"""Composes the report about a run in which nothing moves."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_app_ppo.watchdog.stacks import descendants, dumped_stacks, own_stacks, task_stacks
from rl_app_ppo.watchdog.unanswered_calls import CallLog
from rl_protocol.ports import ReplayBuffer


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What the watchdog looks at.

    Attributes:
        calls: of the worker processes.
        buffers: the replay buffer of each partition.
        processes: the processes of this host by id, with their names.
        fate: how a process ended, or that it is stopped; empty while it runs.
        resources: says what the run asked Ray for, and what Ray has.
        logs: folder of the logs of all processes.
    """

    calls: CallLog
    buffers: Mapping[str, ReplayBuffer]
    processes: Callable[[], Mapping[int, str]]
    fate: Callable[[int], str]
    resources: Callable[[], str]
    logs: Path

    def progress(self) -> object:
        """A value that changes when a call ends, a session settles, or a group changes status."""
        groups = tuple(
            (tuple(sorted(buffer.counts().items())), tuple(buffer.unsettled().items()))
            for buffer in self.buffers.values()
        )
        return self.calls.ended, groups

    def report(self, hang_s: float, loop: asyncio.AbstractEventLoop) -> tuple[str, str]:
        """What waits, and that with the stacks of all processes."""
        waiting = "\n".join(
            [
                f"Nothing has moved for {hang_s:g} s (trainer.hang_report_s): no call of a worker has ended, and no "
                "response of a prompt was settled. Waiting:",
                *self._calls(),
                *self._groups(),
                *self._processes(),
                f"  {self.resources()}",
            ]
        )
        stacks = [f"tasks of the driver\n{task_stacks(loop)}", f"threads of the driver\n{own_stacks()}"]
        stacks += [f"process {name}\n{text}" for name, text in dumped_stacks(self._pids(), self.logs).items()]
        return waiting, "\n\n".join([waiting, *(f"=== {text}" for text in stacks)])

    def _pids(self) -> Sequence[int]:
        return sorted({*self.processes(), *descendants(os.getpid())} - {os.getpid()})

    def _calls(self) -> list[str]:
        now = time.monotonic()
        return [f"  {call.describe(now)}" for call in self.calls.open()] or ["  no call of a worker"]

    def _groups(self) -> list[str]:
        lines: list[str] = []
        for name, buffer in self.buffers.items():
            counts = ", ".join(f"{count} {status}" for status, count in buffer.counts().items() if count)
            unsettled = "; ".join(f"{uid}: sessions {_numbers(of)}" for uid, of in buffer.unsettled().items())
            lines += [f"  prompts in {name!r}: {counts}" + (f". Not settled: {unsettled}" if unsettled else "")] * bool(
                counts
            )
        return lines

    def _processes(self) -> list[str]:
        found = ((name, pid, self.fate(pid)) for pid, name in self.processes().items())
        return [f"  {name} (process {pid}) {fate}" for name, pid, fate in found if fate]


def _numbers(sessions: Sequence[int]) -> str:
    return ", ".join(map(str, sessions))
