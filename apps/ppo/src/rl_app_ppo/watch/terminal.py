"""Follows a run on the terminal: a live panel, or plain lines where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import plotext
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rl_app_ppo.outputs.console import step_line
from rl_app_ppo.watch.followed_run import FollowedRun, Seen
from rl_app_ppo.watch.overview import Overview, WorkerNow, alarm_line, overview, seconds_left, state

EVERY_S = 1.0
_BAR = 20
_CURVE_ROWS = (6, 12)
"""Fewest and most rows of a curve, with its axes."""
_AROUND = 6
"""Rows besides: two of the frame, the state, a progress bar, and two lines above it."""


def watch(folder: Path, out: Console, wait: Callable[[float], None] = time.sleep) -> bool:
    """Show a run until it is over; returns whether it finished.

    Args:
        folder: of the run.
        out: where to show it.
        wait: waits for some seconds.

    Raises:
        ConfigError: it is no folder of a run, or can't be read.
    """
    run = FollowedRun(folder)
    (_panel if out.is_terminal else _lines)(run, out, wait)
    end = run.read(time.time()).record.end
    return end is not None and end.outcome == "finished"


def _panel(run: FollowedRun, out: Console, wait: Callable[[float], None]) -> None:
    with Live(console=out, auto_refresh=False) as live:
        while True:
            now = time.time()
            seen = run.read(now)
            live.update(panel(overview(seen, now), out.width, out.height), refresh=True)
            if seen.over:
                return
            wait(EVERY_S)


def _lines(run: FollowedRun, out: Console, wait: Callable[[float], None]) -> None:
    printed = Printed()
    while True:
        now = time.time()
        seen = run.read(now)
        for line in printed.more(seen):
            out.print(Text(line), soft_wrap=True)
        if seen.over:
            out.print(Text(state(seen, now)), soft_wrap=True)
            return
        wait(EVERY_S)


class Printed:
    """What was printed of a run, as lines."""

    def __init__(self) -> None:
        self._step = 0
        self._alarms = 0

    def more(self, seen: Seen) -> Iterable[str]:
        """The lines that are new."""
        total = seen.record.starts[-1].steps if seen.record.starts else 0
        left = seconds_left(seen)
        for line in seen.metrics:
            if (step := int(line["step"])) > self._step:
                self._step = step
                yield step_line(step, total, line, left if line is seen.metrics[-1] else None)
        for alarm in seen.record.alarms[self._alarms :]:
            yield alarm_line(alarm)
        self._alarms = len(seen.record.alarms)


def panel(shown: Overview, width: int, height: int) -> RenderableType:
    """The panel of a terminal of this size; without the curve where there is no room for it."""
    numbers = [Text(text, no_wrap=True, overflow="ellipsis") for text in (shown.numbers, shown.stages) if text]
    alarms = [Text(alarm, style="red", no_wrap=True, overflow="ellipsis") for alarm in shown.alarms]
    parts: list[RenderableType] = [Text(shown.state, style="bold")]
    rows = height - _AROUND - len(shown.workers) - len(numbers) - len(alarms)
    fewest, most = _CURVE_ROWS
    if any(shown.curves.values()) and rows >= fewest:
        parts.append(_curve(shown.curves, min(width - 4, 96), min(rows, most)))
    if shown.workers:
        parts.append(_workers(shown.workers))
    return Panel(Group(*parts, *numbers, *alarms), title=Text(shown.title), title_align="left")


def _curve(curves: Mapping[str, Sequence[tuple[int, float]]], width: int, rows: int) -> Text:
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(width, rows)
    for name, points in curves.items():
        if points:
            plotext.plot([step for step, _ in points], [value for _, value in points], label=name)
    plotext.xlabel("step")
    return Text.from_ansi(plotext.build())


def _workers(workers: Sequence[WorkerNow]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(3):
        table.add_column(no_wrap=True, overflow="ellipsis")
    for worker in workers:
        filled = round(worker.busy * _BAR)
        bar = "█" * filled + "░" * (_BAR - filled)
        table.add_row(Text(worker.name), Text(f"{bar} {worker.busy:4.0%} busy"), Text(worker.doing))
    return table
