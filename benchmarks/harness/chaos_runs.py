"""Runs with faults, as result files have them: the newest of each, the matrix and its bars.

A result file has the runs of one commit. A run that failed stays in its file; once the same faults
have been repeated at a later commit, the matrix counts that run.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from harness.pairs import judge
from harness.result_schema import Document, Row
from rl_app_ppo.chaos.judge import Kind, Outcome
from rl_app_ppo.chaos.report import CELLS, cells
from rl_app_ppo.chaos.schedule import Fault, Schedule, Victim

NAME = "chaos_"
"""A result is called chaos_plane or chaos_app."""
MOST, OF_THE_APP, PER_CELL = 500, 120, 3


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run, and the code that ran."""

    outcome: Outcome
    commit: str
    ended: str
    """UTC, in ISO 8601."""

    @property
    def name(self) -> str:
        """Such as "app 22/7": kind, seed, number."""
        return named(self.outcome)

    @property
    def faults(self) -> tuple[Kind, Schedule]:
        """Runs with the same are repetitions of one another."""
        return self.outcome.kind, self.outcome.schedule


def named(outcome: Outcome) -> str:
    """Kind, seed and number of a run."""
    return f"{outcome.kind} {outcome.schedule.seed}/{outcome.schedule.number}"


def to_row(outcome: Outcome) -> Row:
    """A run that has just ended, as a row of a result file."""
    ended = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    return {
        "chaos_run": named(outcome),
        "ended": ended,
        "good": outcome.good,
        "outcome": msgspec.to_builtins(outcome),
    }


def runs_of(documents: Iterable[Document]) -> list[Run]:
    """All runs of these files, the oldest first.

    Raises:
        ValueError: a row is broken.
    """
    found = [
        Run(outcome=msgspec.convert(row["outcome"], Outcome), commit=document.commit, ended=row["ended"])
        for document in documents
        for row in document.rows
        if "chaos_run" in row
    ]
    return sorted(found, key=lambda run: run.ended)


def newest(runs: Sequence[Run]) -> list[Run]:
    """The last repetition of each run."""
    return [*{run.faults: run for run in runs}.values()]


def planned(runs: Sequence[Run], kind: Kind, all_schedules: Sequence[Schedule]) -> list[Schedule]:
    """Which runs are to be made: first those whose last repetition failed, then those of
    `all_schedules` that are missing, and of these first the ones of cells with too few runs."""
    last = {run.outcome.schedule: run.outcome for run in newest(runs) if run.outcome.kind == kind}
    counts = Counter((strike.victim, strike.fault) for outcome in last.values() for strike in outcome.strikes)
    scarce: list[Schedule] = []
    others: list[Schedule] = []
    for schedule in (schedule for schedule in all_schedules if schedule not in last):
        struck = {(strike.victim, strike.fault) for strike in schedule.strikes}
        (scarce if any(counts[cell] < PER_CELL for cell in struck) else others).append(schedule)
        counts.update(struck)
    return [*(schedule for schedule, outcome in last.items() if not outcome.good), *scarce, *others]


def bars(runs: Sequence[Run]) -> list[Row]:
    """What there is beside what there must be, of the newest runs."""
    app = [run.outcome for run in runs if run.outcome.kind == "app"]
    modes = [[one for one in app if bool(one.schedule.max_staleness) == mode] for mode in (False, True)]
    fewest = [min(cells(some)[0][cell] for cell in CELLS["app"]) for some in (app, *modes)]
    asked = [
        ("runs", len(runs), MOST, True),
        ("runs of the application", len(app), OF_THE_APP, True),
        ("runs of the application in the emptiest cell", fewest[0], PER_CELL, True),
        ("the same, synchronous", fewest[1], 1, True),
        ("the same, deterministic asynchronous", fewest[2], 1, True),
        ("runs that failed", sum(not run.outcome.good for run in runs), 0, False),
    ]
    return [
        {"question": question, "value": float(value), **judge(value, bar, bar, at_least=at_least)}
        for question, value, bar, at_least in asked
    ]


def matrix(outcomes: Sequence[Outcome], kind: Kind) -> str:
    """Runs of a kind per victim and fault as Markdown, and how many of them failed.

    Missing cells are bold; a dash: the victim has no such fault.
    """
    runs, failed = cells(outcomes)

    def text(cell: tuple[Victim, Fault]) -> str:
        if cell not in CELLS[kind]:
            return "-"
        if not runs[cell]:
            return "**missing**"
        return f"{runs[cell]}, **{failed[cell]} failed**" if failed[cell] else str(runs[cell])

    lines = ["| victim | " + " | ".join(fault.value for fault in Fault) + " |", "|" + "---|" * (1 + len(Fault))]
    lines += [f"| {victim.value} | " + " | ".join(text((victim, fault)) for fault in Fault) + " |" for victim in Victim]
    return "\n".join(lines)


def missing(outcomes: Sequence[Outcome], kind: Kind) -> list[str]:
    """The cells of a kind without a run."""
    runs, _ = cells(outcomes)
    return [f"{fault.value} of {victim.value}" for victim, fault in CELLS[kind] if not runs[victim, fault]]


def failures(runs: Sequence[Run]) -> list[Row]:
    """Every run that failed, and the commit at which the same faults were survived later."""
    last = {run.faults: run for run in newest(runs)}
    rows: list[Row] = []
    for run in runs:
        if run.outcome.good:
            continue
        later, strikes = last[run.faults], Counter(run.outcome.strikes)
        rows.append(
            {
                "run": run.name,
                "commit": run.commit,
                "faults": ", ".join(f"{one.fault.value} of {one.victim.value}" for one in strikes) or "none struck",
                "what": wrong(run.outcome),
                "survived": later.commit if later.outcome.good else "**not yet**",
            }
        )
    return rows


def wrong(outcome: Outcome) -> str:
    """What is wrong of a run, in one line."""
    counts = {name: getattr(outcome, name) for name in ("lost", "doubled", "held", "went_back")}
    facts = [f"{count} {name.replace('_', ' ')}" for name, count in counts.items() if count]
    facts += ["hung"] if outcome.hung else []
    facts += [f"{len(outcome.left)} left behind"] if outcome.left else []
    facts += [outcome.failure.splitlines()[0][:100]] if outcome.failure else []
    return ", ".join(facts).replace("|", r"\|")
