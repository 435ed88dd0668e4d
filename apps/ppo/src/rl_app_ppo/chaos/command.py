"""`rl chaos`: runs with faults, one after the other, and their report."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from rl_app_ppo.chaos import app_runs, plane_runs
from rl_app_ppo.chaos.app_runs import Straight
from rl_app_ppo.chaos.judge import Outcome
from rl_app_ppo.chaos.report import matrix, points, summarize
from rl_app_ppo.chaos.runner import Runner
from rl_app_ppo.chaos.schedule import make_schedule
from rl_protocol import OutputError


def chaos(runs: int, seed: int, first: int, json: Path | None, out: Console, *, model: bool) -> bool:
    """Run schedules of a seed, print each and the matrix; returns whether nothing was lost.

    Args:
        runs: how many.
        seed: decides all faults.
        first: number of the first of them; a schedule depends on seed and number alone.
        json: where to write the report.
        out: where to print.
        model: run the whole application; otherwise a stand-in takes the place of the model.

    Raises:
        OutputError: the report can't be written.
        RLError: the application fails without faults.
    """
    folder = Path(tempfile.mkdtemp(prefix="rl-chaos-"))
    outcomes: list[Outcome] = []
    straights = dict[int, Straight]()
    for number in range(first, first + runs):
        schedule = make_schedule(seed, number, app_runs.PACE if model else plane_runs.PACE)
        place, staleness = folder / str(number), schedule.max_staleness
        if model and staleness not in straights:
            out.print(Text("a run without faults, to compare with"))
            straights[staleness] = app_runs.run_straight(folder / f"straight-{staleness}", staleness)
        subject = (
            app_runs.AppSubject(place, staleness, straights[staleness])
            if model
            else plane_runs.PlaneSubject(place, staleness)
        )
        outcome = Runner(subject, schedule, place).run()
        outcomes.append(outcome)
        out.print(Text(described(outcome), style="" if outcome.good else "red"), soft_wrap=True)
        if outcome.good:
            shutil.rmtree(place)
    report = summarize(seed, outcomes)
    if json is not None:
        _write(json, msgspec.json.format(msgspec.json.encode(report), indent=1))
    out.print(matrix(outcomes))
    out.print(points(outcomes))
    out.print(Text(str(report.summary)), soft_wrap=True)
    if report.summary.failed:
        out.print(Text(f"the folders of the failed runs are in {folder}"), soft_wrap=True)
        return False
    shutil.rmtree(folder)
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


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content + b"\n")
    except OSError as error:
        raise OutputError(
            f"The report can't be written to {path}, {error.strerror}; give --json another file."
        ) from error
