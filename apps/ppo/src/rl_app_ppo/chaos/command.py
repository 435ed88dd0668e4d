"""`rl chaos`: runs with faults, one after the other, and their report."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from rl_app_ppo.chaos.judge import Outcome
from rl_app_ppo.chaos.plane_runs import PlaneRunner
from rl_app_ppo.chaos.report import matrix, points, summarize
from rl_app_ppo.chaos.schedule import make_schedule
from rl_app_ppo.chaos.stand_in import PlaneRun
from rl_protocol import OutputError

_EVENTS = PlaneRun(folder="").events


def chaos(runs: int, seed: int, first: int, json: Path | None, out: Console) -> bool:
    """Run schedules of a seed, print each and the matrix; returns whether nothing was lost.

    Args:
        runs: how many.
        seed: decides all faults.
        first: number of the first of them; a schedule depends on seed and number alone.
        json: where to write the report.
        out: where to print.

    Raises:
        OutputError: the report can't be written.
    """
    folder = Path(tempfile.mkdtemp(prefix="rl-chaos-"))
    outcomes: list[Outcome] = []
    for number in range(first, first + runs):
        outcome = PlaneRunner(make_schedule(seed, number, _EVENTS), folder / str(number)).run()
        outcomes.append(outcome)
        out.print(Text(described(outcome), style="" if outcome.good else "red"), soft_wrap=True)
        if outcome.good:
            shutil.rmtree(folder / str(number))
    report = summarize(seed, outcomes)
    _write(json, lambda: msgspec.json.format(msgspec.json.encode(report), indent=1))
    out.print(matrix(outcomes))
    out.print(points(outcomes))
    out.print(Text(str(report.summary)), soft_wrap=True)
    if report.summary.failed:
        out.print(Text(f"the folders of the failed runs are in {folder}"), soft_wrap=True)
        return False
    folder.rmdir()
    return True


def described(outcome: Outcome) -> str:
    """One line, or more for a run of which something is wrong."""
    schedule = outcome.schedule
    faults = ", ".join(
        f"{one.fault.value} of {one.victim.value} at {one.point or 'event'} {one.passes or one.event}"
        for one in schedule.strikes[: outcome.struck]
    )
    mode = "asynchronous" if schedule.max_staleness else "synchronous"
    line = f"run {schedule.number}, {mode}: {faults or 'not struck'}; {outcome.starts} starts, {outcome.seconds:.1f} s"
    if outcome.good:
        return line
    counts = f"{outcome.lost} lost, {outcome.doubled} doubled, {outcome.held} held, {outcome.went_back} went back"
    facts = [counts, *(["hung"] if outcome.hung else []), *(f"left: {one}" for one in outcome.left), outcome.failure]
    return "\n  ".join([line, *filter(None, facts)])


def _write(path: Path | None, content: Callable[[], bytes]) -> None:
    if path is None:
        return
    try:
        path.write_bytes(content() + b"\n")
    except OSError as error:
        raise OutputError(
            f"The report can't be written to {path}, {error.strerror}; give --json another file."
        ) from error
