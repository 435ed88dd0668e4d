"""Paired timing: subjects take turns within one run; medians of paired ratios count."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.result_schema import load
from harness.results import command_line, commit, write_result

_ALL_ITS_THREADS = 2
"""CPUCLOCK_SCHED of Linux."""


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU seconds of all threads of the processes, ended threads included; 0 for a dead process."""
    total = 0.0
    for pid in pids:
        with suppress(OSError):
            total += time.clock_gettime(~pid << 3 | _ALL_ITS_THREADS)  # its clock, as of clock_getcpuclockid(3)
    return total


def rss_mib(pid: int) -> float:
    """Resident memory of a process, without pages of files and shared memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise ProcessLookupError(pid)


@dataclass(frozen=True)
class Subject:
    """A timed subject: `step` is timed, `reset` runs untimed after it; `pids` work for it."""

    name: str
    step: Callable[[], object]
    pids: Sequence[int]
    reset: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Timing:
    """Seconds of one step."""

    wall: float
    cpu: float


def take_turns(subjects: Sequence[Subject], pairs: int, warm_up: int = 2) -> dict[str, list[Timing]]:
    """Run every subject `pairs` times, in changing order."""
    timings: dict[str, list[Timing]] = {subject.name: [] for subject in subjects}
    for turn in range(-warm_up, pairs):
        for subject in subjects if turn % 2 else list(reversed(subjects)):
            cpu, wall = cpu_seconds(subject.pids), time.perf_counter()
            subject.step()
            wall = time.perf_counter() - wall
            cpu = cpu_seconds(subject.pids) - cpu
            subject.reset()
            if turn >= 0:
                timings[subject.name].append(Timing(wall, cpu))
    return timings


def paired(timings: Mapping[str, Sequence[Timing]], of: str, to: str, what: str = "wall") -> dict[str, float]:
    """Median and extremes of (time of `of`) / (time of `to`) over the pairs."""
    ratios = [getattr(a, what) / max(getattr(b, what), 1e-9) for a, b in zip(timings[of], timings[to], strict=True)]
    return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}


def summary(timings: Mapping[str, Sequence[Timing]], nbytes: int | None = None) -> dict[str, Any]:
    """Medians of each subject; with `nbytes` also GiB/s and CPU seconds per GiB."""
    out: dict[str, Any] = {}
    for name, values in timings.items():
        wall, cpu = statistics.median(t.wall for t in values), statistics.median(t.cpu for t in values)
        row = {"wall_ms": wall * 1e3, "cpu_ms": cpu * 1e3}
        if nbytes is not None:
            row |= {"gib_per_s": nbytes / wall / 2**30, "cpu_s_per_gib": cpu / nbytes * 2**30}
        out[name] = {key: float(f"{value:.4g}") for key, value in row.items()}
    return out


def judge(value: float, must: float | None, aim: float, *, at_least: bool) -> dict[str, str]:
    """The bars, and which is met: "aim", "must", or "missed".

    Without a required value, `must` is empty, and so is `met` below the aim.
    """

    def met(bar: float) -> bool:
        return value >= bar if at_least else value <= bar

    sign = ">=" if at_least else "<="
    below = "" if must is None else "must" if met(must) else "missed"
    return {
        "must": "" if must is None else f"{sign} {must:g}",
        "aim": f"{sign} {aim:g}",
        "met": "aim" if met(aim) else below,
    }


def verdict(
    question: str, value: float, must: float | None, aim: float, *, at_least: bool, **more: Any
) -> dict[str, Any]:
    """One row of a result."""

    row = {
        "question": question,
        "value": float(f"{value:.4g}"),
        **judge(value, must, aim, at_least=at_least),
        **more,
    }
    print(f"{row['met']:>6}  {question}: {row['value']:g} (must {row['must'] or 'none'}, aim {row['aim']})", flush=True)
    return row


def against(
    question: str, timings: Mapping[str, Sequence[Timing]], peers: Sequence[str], must: float, aim: float, **more: Any
) -> dict[str, Any]:
    """How many times faster "ours" is than the best of the peers."""
    ratios = {peer: paired(timings, peer, "ours") for peer in peers}
    cpu = {peer: paired(timings, peer, "ours", "cpu")["median"] for peer in peers}
    best = min(ratios, key=lambda peer: ratios[peer]["median"])
    value = ratios[best]["median"]
    return verdict(question, value, must, aim, at_least=True, best_peer=best, wall_ratio=ratios, cpu_ratio=cpu, **more)


def publish(name: str, rows: list[dict[str, Any]], command: list[str] | None = None) -> Path | None:
    """Write the result file and return its path; write nothing if tracked files have changes.

    Args:
        name: of the benchmark.
        rows: measured values, see `result_schema.KINDS`.
        command: how the benchmark was started; None: this process's command line.

    Raises:
        ValueError: a row is broken, see `result_schema.check`.
    """
    if commit().endswith("-dirty"):
        print("not written: the working tree has changes", file=sys.stderr)
        return None
    path = write_result(name, command or command_line(), rows)
    load(path)
    print(path)
    return path
