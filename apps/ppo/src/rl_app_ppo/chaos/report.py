"""The table of the runs of `rl chaos`: victims and faults, runs and failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rich.table import Table

from rl_app_ppo.chaos.judge import Kind, Outcome
from rl_app_ppo.chaos.schedule import APP_CELLS, NOT_KILLED_AT, PLANE_CELLS, Fault, Victim
from rl_protocol import ConfigError
from rl_protocol.counted import counted
from rl_protocol.errors import UNREADABLE
from rl_protocol.support.disk_writes import write_errors
from rl_protocol.support.fault_points import FaultPoint

CELLS: Mapping[Kind, Sequence[tuple[Victim, Fault]]] = {"plane": PLANE_CELLS, "app": APP_CELLS}


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """All runs of a command."""

    seed: int
    runs: int
    lost: int
    doubled: int
    held: int
    went_back: int
    hung: int
    left: int
    failed: int
    """Runs of which anything is wrong."""

    def __str__(self) -> str:
        """One line."""
        return (
            f"{counted(self.runs, 'run')} of seed {self.seed}: {self.lost} lost, {self.doubled} doubled, {self.held} held, "
            f"{self.went_back} went back, {self.hung} hung, {self.left} left behind; failed: {counted(self.failed, 'run')}"
        )


class ChaosReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` writes."""

    summary: Summary
    outcomes: tuple[Outcome, ...]


def read_report(path: Path, seed: int) -> list[Outcome]:
    """The runs that `--json` has written before; none: there is no file.

    Raises:
        ConfigError: it is no such file, or of another seed.
    """
    if not path.exists():
        return []
    if not path.is_file():
        raise ConfigError(f"--json {path} must be a file, such as chaos.json.")
    try:
        report = msgspec.json.decode(path.read_bytes(), type=ChaosReport)
    except (*UNREADABLE, OSError) as error:
        raise ConfigError(f"--json {path} is no report of runs: {error}; give another file.") from error
    if report.summary.seed != seed:
        raise ConfigError(
            f"--json {path} has runs of seed {report.summary.seed}, got --seed {seed}; give another file."
        )
    return list(report.outcomes)


def write_report(path: Path, report: ChaosReport) -> None:
    """Replace the file.

    Raises:
        OutputError: it can't be written.
    """
    with write_errors(path, what="The report", remedy="Give --json another file."):
        new = path.with_name(f".{path.name}.new")
        new.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
        new.replace(path)


def summarize(seed: int, outcomes: Sequence[Outcome]) -> ChaosReport:
    """The report of all runs of a seed."""
    summary = Summary(
        seed=seed,
        runs=len(outcomes),
        lost=sum(one.lost for one in outcomes),
        doubled=sum(one.doubled for one in outcomes),
        held=sum(one.held for one in outcomes),
        went_back=sum(one.went_back for one in outcomes),
        hung=sum(one.hung for one in outcomes),
        left=sum(len(one.left) for one in outcomes),
        failed=sum(not one.good for one in outcomes),
    )
    return ChaosReport(summary=summary, outcomes=tuple(outcomes))


def cells(outcomes: Sequence[Outcome]) -> tuple[Counter[tuple[Victim, Fault]], Counter[tuple[Victim, Fault]]]:
    """Runs that were struck by victim and fault, and those of them that failed."""
    runs, failed = Counter[tuple[Victim, Fault]](), Counter[tuple[Victim, Fault]]()
    for one in outcomes:
        struck = {(strike.victim, strike.fault) for strike in one.strikes}
        runs.update(struck)
        failed.update(struck if not one.good else ())
    return runs, failed


def points(outcomes: Sequence[Outcome]) -> Table:
    """Runs per point of the code that a process was killed at; red as in `matrix`."""
    runs, failed = Counter[FaultPoint | None](), Counter[FaultPoint | None]()
    for one in outcomes:
        reached = {strike.point for strike in one.strikes if strike.fault is Fault.KILL}
        runs.update(reached)
        failed.update(reached if not one.good else ())
    table = Table("killed at", "runs")
    for point in (point for point in FaultPoint if point not in NOT_KILLED_AT):
        table.add_row(point.value, _cell(runs[point], failed[point]))
    return table


def _cell(runs: int, failed: int) -> str:
    text = f"{runs}, {failed} failed" if failed else str(runs)
    return text if runs and not failed else f"[red]{text}[/red]"


def matrix(outcomes: Sequence[Outcome]) -> Table:
    """Runs per victim and fault; red where there are none, or where one failed. A dash: no such
    fault in runs of these kinds."""
    runs, failed = cells(outcomes)
    possible = {cell for one in outcomes for cell in CELLS[one.kind]}
    table = Table("victim", *(fault.value for fault in Fault))
    for victim in Victim:
        row = [victim.value]
        for fault in Fault:
            cell = victim, fault
            row.append(_cell(runs[cell], failed[cell]) if cell in possible else "-")
        table.add_row(*row)
    return table
