"""`rl chaos`: runs with faults, several at a time, and their report."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from rich.console import Console
from rich.text import Text

from rl_app_ppo.chaos.app_runs import PACE as APP_PACE
from rl_app_ppo.chaos.app_runs import SAVE_FREQ, AppSubject, Straight, run_straight
from rl_app_ppo.chaos.judge import Kind, Outcome
from rl_app_ppo.chaos.plane_runs import PACE as PLANE_PACE
from rl_app_ppo.chaos.plane_runs import PlaneSubject
from rl_app_ppo.chaos.report import ChaosReport, matrix, points, read_report, summarize, write_report
from rl_app_ppo.chaos.runner import Runner, Subject
from rl_app_ppo.chaos.schedule import Fault, Schedule, make_schedule
from rl_protocol import ConfigError

PACES = {"plane": PLANE_PACE, "app": APP_PACE}


def chaos(
    runs: int, seed: int, first: int, json: Path | None, out: Console, *, model: bool, at_a_time: int = 1
) -> bool:
    """Run schedules of a seed, print each and the matrix; returns whether nothing was lost.

    Args:
        runs: how many.
        seed: decides all faults.
        first: number of the first of them; a schedule depends on seed and number alone.
        json: where to write the report, after each run. Those that it has already are not repeated.
        out: where to print.
        model: run the whole application; otherwise a stand-in takes the place of the model.
        at_a_time: runs at once.

    Raises:
        ConfigError: the report has other runs.
        OutputError: the report can't be written.
        RLError: the application fails without faults.
    """
    kind: Kind = "app" if model else "plane"
    wanted = [make_schedule(seed, number, PACES[kind]) for number in range(first, first + runs)]
    outcomes = read_report(json, seed) if json is not None else []
    missing = _missing(wanted, outcomes, kind)
    folder = Path(tempfile.mkdtemp(prefix="rl-chaos-"))
    if json is not None:
        write_report(json, summarize(seed, outcomes))
    for outcome in run_each(missing, kind, folder, out, at_a_time):
        outcomes.append(outcome)
        if json is not None:
            write_report(json, summarize(seed, outcomes))
    return _conclude(summarize(seed, outcomes), folder, out)


def run_each(
    schedules: Sequence[Schedule], kind: Kind, folder: Path, out: Console, at_a_time: int = 1
) -> Iterator[Outcome]:
    """Run schedules, print each, and yield how it ended as soon as it has.

    Args:
        schedules: of the runs.
        kind: of all of them.
        folder: exists; those of failed runs stay in it.
        out: where to print.
        at_a_time: runs at once.

    Raises:
        RLError: the application fails without faults.
    """
    modes = sorted({run.max_staleness for run in schedules}) if kind == "app" else []
    straights = {one: _straight(folder, one, out) for one in modes}
    with ThreadPoolExecutor(at_a_time) as pool:
        started = [pool.submit(_run, schedule, folder, straights) for schedule in schedules]
        for ended in as_completed(started):
            outcome = ended.result()
            out.print(Text(described(outcome), style="" if outcome.good else "red"), soft_wrap=True)
            yield outcome


def _missing(wanted: Sequence[Schedule], outcomes: Sequence[Outcome], kind: Kind) -> list[Schedule]:
    """The schedules that no outcome is of.

    Raises:
        ConfigError: an outcome has another schedule of the same number.
    """
    there = {one.schedule.number: one.schedule for one in outcomes if one.kind == kind}
    if changed := [run.number for run in wanted if there.get(run.number, run) != run]:
        raise ConfigError(f"The report of --json has run {changed[0]} with other faults; give another file.")
    return [run for run in wanted if run.number not in there]


def _straight(folder: Path, max_staleness: int, out: Console) -> Straight:
    out.print(Text("a run without faults, to compare with"))
    return run_straight(folder / f"straight-{max_staleness}", max_staleness)


def _run(schedule: Schedule, folder: Path, straights: dict[int, Straight]) -> Outcome:
    place, staleness = folder / str(schedule.number), schedule.max_staleness
    subject: Subject = PlaneSubject(place, staleness)
    if staleness in straights:
        flips = any(strike.fault is Fault.FLIP_CHECKPOINT for strike in schedule.strikes)
        subject = AppSubject(place, staleness, straights[staleness], 1 if flips else SAVE_FREQ)
    outcome = Runner(subject, schedule, place).run()
    if outcome.good:
        shutil.rmtree(place)
    return outcome


def _conclude(report: ChaosReport, folder: Path, out: Console) -> bool:
    out.print(matrix(report.outcomes))
    out.print(points(report.outcomes))
    out.print(Text(str(report.summary)), soft_wrap=True)
    if any(folder.iterdir()) and report.summary.failed:
        out.print(Text(f"the folders of the failed runs are in {folder}"), soft_wrap=True)
    else:
        shutil.rmtree(folder)
    return not report.summary.failed


def described(outcome: Outcome) -> str:
    """One line, or more for a run of which something is wrong."""
    schedule = outcome.schedule
    faults = ", ".join(
        f"{one.fault.value} of {one.victim.value} at {one.point or 'event'} {one.passes or one.event}"
        for one in outcome.strikes
    )
    mode = "asynchronous" if schedule.max_staleness else "synchronous"
    line = f"run {schedule.number}, {mode}: {faults or 'not struck'}; {outcome.starts} starts, {outcome.seconds:.1f} s"
    if outcome.good:
        return line
    counts = f"{outcome.lost} lost, {outcome.doubled} doubled, {outcome.held} held, {outcome.went_back} went back"
    facts = [counts, *(["hung"] if outcome.hung else []), *(f"left: {one}" for one in outcome.left), outcome.failure]
    return "\n  ".join([line, *filter(None, facts)])
