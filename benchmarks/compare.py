"""Compare a result with its baseline.

    uv run benchmarks/compare.py BASELINE.json RUN.json [--threshold 10] [--other-hardware]
    uv run --group bench benchmarks/compare.py --headlines [--threshold 10] [--other-hardware]

With --headlines it measures the ten ratios of harness/headlines.py, writes headlines.json, and
compares it with the newest published one.

Prints every measured number of both with its change in per cent. Exits with code 1 if one is worse
by more than the threshold, and 2 if the two can't be compared: other hardware, a row that the run
lacks, a broken file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.headlines import baseline as published_headlines
from harness.headlines import measure
from harness.result_schema import Direction, Document, directions, identity, load
from harness.results import hardware_slug


@dataclass(frozen=True)
class Change:
    """One number of baseline and run."""

    what: str
    before: float
    after: float
    better: Direction

    @property
    def worse_percent(self) -> float:
        """How much worse the run is, in per cent of the baseline; infinite from a baseline of 0."""
        loss = self.after - self.before if self.better == "lower" else self.before - self.after
        if not loss:
            return 0.0
        return 100 * loss / abs(self.before) if self.before else float("inf") * (1 if loss > 0 else -1)


def changes(baseline: Document, run: Document) -> list[Change]:
    """Every number that both measured.

    Raises:
        ValueError: other benchmarks, a row the run lacks, or nothing to compare.
    """
    if baseline.benchmark != run.benchmark:
        raise ValueError(f"the baseline is of {baseline.benchmark!r}, the run of {run.benchmark!r}")
    rows = {identity(row): row for row in run.rows}
    out: list[Change] = []
    for before in baseline.rows:
        after = rows.get(identity(before))
        if after is None:
            raise ValueError(f"the run has no row {identity(before)}")
        for name, better in directions(before).items():
            if name in before and name not in after:
                raise ValueError(f"the run's row {identity(before)} has no {name}")
            if name in before:
                out.append(Change(" ".join((*identity(before), name)), before[name], after[name], better))
    if not out:
        raise ValueError(f"{baseline.benchmark} holds no numbers that are better higher or lower")
    return out


def report(found: Sequence[Change], threshold: float) -> int:
    """Print one line each; return the exit code."""
    bad = 0
    for change in found:
        worse = change.worse_percent > threshold
        bad += worse
        sign = "worse " if worse else "      "
        print(f"{sign} {change.before:12.6g} -> {change.after:12.6g}  {-change.worse_percent:+8.1f} %  {change.what}")
    print(f"{bad} of {len(found)} numbers are worse by more than {threshold:g} %")
    return 1 if bad else 0


def files(baseline: Path | None, run: Path | None, *, headlines: bool) -> tuple[Path, Path]:
    """The two files to compare; measures the headline ratios where they are asked for.

    Raises:
        ValueError: both files or --headlines must be given, and a baseline must be published.
    """
    if headlines != (baseline is None) or headlines != (run is None):
        raise ValueError("Give BASELINE.json and RUN.json, or --headlines alone.")
    if baseline is None or run is None:
        baseline, run = published_headlines(), measure()
    if baseline is None:
        raise ValueError(f"No headlines.json is published; `git add {run}` makes it the baseline.")
    return baseline, run


def main() -> int:
    """Compare two files; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("baseline", type=Path, nargs="?")
    parser.add_argument("run", type=Path, nargs="?")
    parser.add_argument("--headlines", action="store_true", help="measure the headline ratios, half an hour")
    parser.add_argument("--threshold", type=float, default=10.0, help="per cent")
    parser.add_argument("--other-hardware", action="store_true", help="compare although the machines differ")
    arguments = parser.parse_args()
    try:
        baseline, run = (load(path) for path in files(arguments.baseline, arguments.run, headlines=arguments.headlines))
        slugs = [hardware_slug(document.hardware) for document in (baseline, run)]
        if slugs[0] != slugs[1] and not arguments.other_hardware:
            raise ValueError(f"the machines differ: {slugs[0]} and {slugs[1]} (--other-hardware compares them anyway)")
        return report(changes(baseline, run), arguments.threshold)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
