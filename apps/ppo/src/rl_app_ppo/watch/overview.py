"""What `rl watch` shows of a run: words and numbers, computed from what was read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite, nan
from statistics import median

from rl_app_ppo.config.full_keys import with_full_keys
from rl_app_ppo.outputs.answers import one_line
from rl_app_ppo.outputs.console import THROUGHPUT, clock, stage_shares, validation_accuracy
from rl_app_ppo.watch.followed_run import RECENT_S, SCORE, Seen
from rl_trainer.algorithms.old_log_prob import STALENESS
from rl_trainer.record.record_rows import AlarmRow, CallRow, SpanRow

MOST_ALARMS = 4
MOST_TEXT = 500
"""Characters of a warning or of an error."""
_QUEUE = (
    ("failed sessions", "replay/failed_sessions"),
    ("retried prompts", "replay/retried_prompts"),
    ("partial prompts", "replay/partial_prompts"),
    ("replaced prompts", "replay/replaced_prompts"),
)


@dataclass(frozen=True, slots=True)
class WorkerNow:
    """A worker at this moment."""

    name: str
    doing: str
    """The stages that it computes, or since when it waits, and after which stage."""
    busy: float
    """Share of the last RECENT_S seconds in which it computed."""


@dataclass(frozen=True, kw_only=True)
class Overview:
    """What is shown."""

    title: str
    state: str
    """One line: the step and the time left, the phase of the start, or the end."""
    curves: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict[str, list[tuple[int, float]]])
    workers: Sequence[WorkerNow] = ()
    numbers: str = ""
    stages: str = ""
    """Share of each stage in the time of the last step."""
    alarms: Sequence[str] = ()


def overview(seen: Seen, now: float) -> Overview:
    """What to show of a run at `now`, Unix time."""
    trained = [line for line in seen.metrics if line["step"]]
    last = trained[-1] if trained else {}
    accuracies = [(int(line["step"]), validation_accuracy(line)) for line in seen.metrics]
    curves = {
        "mean score": [(int(line["step"]), line[SCORE]) for line in trained if isfinite(line.get(SCORE, nan))],
        "validation accuracy": [(step, value) for step, value in accuracies if value is not None and isfinite(value)],
    }
    alarms = [alarm_line(row) for row in seen.record.alarms[-MOST_ALARMS:]]
    return Overview(
        title=one_line(seen.name, MOST_TEXT),
        state=state(seen, now),
        curves=curves,
        workers=[] if seen.over else _workers(seen, now),
        numbers=_numbers(last),
        stages=_stages(last),
        alarms=alarms,
    )


def alarm_line(row: AlarmRow) -> str:
    """A warning as one line; it may quote a response, which may hold control characters."""
    return one_line(f"warning: {with_full_keys(row.text)}", MOST_TEXT)


def state(seen: Seen, now: float) -> str:
    """One line about where the run is."""
    record = seen.record
    if record.end is not None:
        return one_line(f"{record.end.outcome} {with_full_keys(record.end.text)}", MOST_TEXT)
    if seen.killed:
        return "killed: its processes are gone, and its record has no end"
    total = record.starts[-1].steps if record.starts else 0
    if not record.steps:
        phase = f" after {record.phases[-1].name}" if record.phases else ""
        return f"starting{phase}"
    step = record.steps[-1].step
    left = seconds_left(seen)
    return f"step {step} of {total}, {clock(max(0.0, now - record.steps[-1].at))} since its end" + (
        "" if left is None else f", {clock(left)} left"
    )


def seconds_left(seen: Seen) -> float | None:
    """Seconds that the remaining steps take at the median pace; None before two steps."""
    steps = [row for row in seen.record.steps if row.step]
    if len(steps) < 2:
        return None
    paces = [(b.at - a.at) / (b.step - a.step) for a, b in pairwise(steps) if b.step > a.step]
    return median(paces) * (seen.record.starts[-1].steps - steps[-1].step) if paces else None


def _workers(seen: Seen, now: float) -> list[WorkerNow]:
    spans: dict[str, list[SpanRow]] = {}
    for span in seen.record.spans:
        spans.setdefault(span.worker, []).append(span)
    calls: dict[str, list[CallRow]] = {}
    for call in seen.record.calls:
        calls.setdefault(call.worker, []).append(call)
    return [_worker(name, spans.get(name, []), calls.get(name, []), now) for name in sorted({*spans, *calls})]


def _worker(name: str, spans: Sequence[SpanRow], running: Sequence[CallRow], now: float) -> WorkerNow:
    if running:
        doing = ", ".join(f"{call.stage} for {clock(max(0.0, now - call.at))}" for call in running)
    else:
        doing = f"waits for {clock(max(0.0, now - spans[-1].at))} after {spans[-1].stage}"
    intervals = [(span.began, span.at) for span in spans] + [(call.at, now) for call in running]
    return WorkerNow(name, doing, covered(intervals, now - RECENT_S, now) / RECENT_S)


def covered(intervals: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """Seconds between `begin` and `end` that at least one interval covers."""
    total, reached = 0.0, begin
    for start, stop in sorted(intervals):
        stop = min(stop, end)
        if stop > reached:
            total += stop - max(start, reached)
            reached = stop
    return total


def _numbers(last: Mapping[str, float]) -> str:
    parts = [f"{last[THROUGHPUT]:,.0f} tokens/s"] if THROUGHPUT in last else []
    if STALENESS in last:
        parts.append(f"staleness at most {last[STALENESS]:.0f}")
    parts += [f"{name} {last[key]:.0f}" for name, key in _QUEUE if last.get(key)]
    return "   ".join(parts)


def _stages(last: Mapping[str, float]) -> str:
    return "   ".join(f"{name} {share:.0%}" for name, share in stage_shares(last) if share >= 0.01)
