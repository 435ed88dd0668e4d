"""Runs a command, and measures all its processes: CPU time, memory, and when lines are written."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.pairs import cpu_seconds

_PR_SET_CHILD_SUBREAPER = 36
LOOK_S = 0.01
"""Seconds between two looks at the lines; lines of one look have the same time."""
_CPU_S = 1.0
"""Seconds between two looks at processes that may end."""
_MEMORY_S = 5.0
"""Seconds between two looks at memory. One takes up to 0.1 s, in which the processes wait for their
page tables; each second it made the steps of many small processes slower than those of one."""
_LINGER_S = 30.0
"""Longest time that a command's processes may outlive it."""


@dataclass(frozen=True)
class Line:
    """A line of JSON that the command wrote.

    Attributes:
        at: seconds since the command was started.
        cpu: CPU seconds of all its processes so far.
        record: its content.
    """

    at: float
    cpu: float
    record: dict[str, Any]


@dataclass(frozen=True)
class CommandRun:
    """What a command took.

    Attributes:
        lines: those it wrote.
        seconds: until it ended.
        cpu: seconds of all its processes.
        peak_pss_mib: largest sum over its processes of their proportional set size (PSS: pages
            that k processes share count 1/k each), of one look per 5 seconds.
    """

    lines: Sequence[Line]
    seconds: float
    cpu: float
    peak_pss_mib: float


@dataclass
class ProcessTree:
    """The descendants of this process, orphans included.

    Only one command may run at a time, and this process must have no other children.
    """

    _cpu: dict[tuple[int, str], float] = field(default_factory=dict[tuple[int, str], float])

    def __post_init__(self) -> None:
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "this process can't adopt orphans")

    def descendants(self) -> dict[int, str]:
        """Process id -> start time, which tells it from a later process of the same id."""
        children: dict[int, list[tuple[int, str]]] = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with suppress(OSError):
                    fields = (folder / "stat").read_text().rpartition(")")[2].split()
                    children.setdefault(int(fields[1]), []).append((int(folder.name), fields[19]))
        found: dict[int, str] = {}
        parents = [os.getpid()]
        while parents:
            below = children.get(parents.pop(), [])
            found.update(below)
            parents += [pid for pid, _ in below]
        return found

    def cpu(self) -> float:
        """CPU seconds of all descendants so far; one that has ended counts as last seen."""
        for pid, started in self.descendants().items():
            if seconds := cpu_seconds([pid]):
                self._cpu[pid, started] = seconds
        return sum(self._cpu.values())

    def pss_mib(self) -> float:
        """Sum of the proportional set sizes."""
        total = 0
        for pid in self.descendants():
            with suppress(OSError):
                for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                    total += int(line.split()[1]) if line.startswith("Pss:") else 0
        return total / 1024


def run_command(
    command: Sequence[str], lines: Path, log: Path, *, env: Mapping[str, str], folder: Path, timeout_s: float
) -> CommandRun:
    """Run a command to its end, and wait for its processes.

    Args:
        command: program and arguments.
        lines: the file to which the command appends lines of JSON.
        log: gets its output.
        env: its environment.
        folder: its working folder.
        timeout_s: longest time of the command.

    Raises:
        RuntimeError: it failed or took too long; the message has the end of its output.
    """
    tree, found, peak, cpu_look, memory_look = ProcessTree(), list[Line](), 0.0, 0.0, 0.0
    with log.open("w") as out:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=dict(env), cwd=folder)
        while (ended := process.poll()) is None and time.perf_counter() - start < timeout_s:
            found += _new_lines(lines, len(found), start, tree)
            if (now := time.perf_counter()) - cpu_look >= _CPU_S:
                cpu_look = now
                tree.cpu()
            if now - memory_look >= _MEMORY_S:
                memory_look, peak = now, max(peak, tree.pss_mib())
            time.sleep(LOOK_S)
        seconds = time.perf_counter() - start
        if ended is None:
            process.terminate()
            process.wait(_LINGER_S)
    found += _new_lines(lines, len(found), start, tree)
    cpu = tree.cpu()
    _reap()
    if ended:
        raise RuntimeError(f"{' '.join(command)} ended with {ended}: {log.read_text()[-3000:]}")
    if ended is None:
        raise RuntimeError(f"{' '.join(command)} took more than {timeout_s:g} s: {log.read_text()[-3000:]}")
    return CommandRun(found, seconds, cpu, peak)


def _new_lines(path: Path, known: int, start: float, tree: ProcessTree) -> list[Line]:
    """The whole lines after the first `known`."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    whole = text[: text.rfind("\n") + 1].splitlines()[known:]
    if not whole:
        return []
    at, cpu = time.perf_counter() - start, tree.cpu()
    return [Line(at, cpu, json.loads(line)) for line in whole]


def _reap() -> None:
    """Wait for adopted orphans, so that they are not counted with the next command.

    Raises:
        RuntimeError: one does not end.
    """
    deadline = time.monotonic() + _LINGER_S
    while time.monotonic() < deadline:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(LOOK_S)
        except ChildProcessError:
            return
    raise RuntimeError(f"processes of the last command still run after {_LINGER_S:g} s")
