"""The ratios that stand for the whole project, each of two sides of one run.

A run on another machine can therefore be held against the published baseline.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.pairs import publish
from harness.result_schema import Row, kind_of, load
from harness.results import ROOT, published_results


@dataclass(frozen=True)
class Headline:
    """A benchmark's command, and the questions of its result that are gathered."""

    command: tuple[str, ...]
    questions: tuple[str, ...]


HEADLINES: Sequence[Headline] = (
    Headline(
        ("bench_data_plane.py", "--only", "put,get", "--pairs", "5"),
        ("put, dense", "get, dense, every page touched", "put, mixed"),
    ),
    Headline(("bench_data_plane.py", "--tcp", "--pairs", "5"), ("TCP put",)),
    Headline(
        ("bench_metadata.py", "--only", "small,lists", "--rounds", "5"),
        ("kv_put of a small row, p50, 4 clients", "metadata of 65536 keys"),
    ),
    Headline(
        ("bench_controller_bottleneck.py", "--planes", "driver,simple", "--pairs", "3", "--name", "headline"),
        ("step without compute, vl, 268 MiB per step, 4 workers (padded): times faster than driver",),
    ),
    Headline(("bench_weight_sync.py", "--only", "shm", "--gib", "0.25"), ("shm, 1 receiver: speed against memcpy",)),
    Headline(
        ("bench_trainer.py", "--only", "throughput", "--pairs", "5"),
        ("tokens/s of an update, share of a bare PyTorch loop",),
    ),
    Headline(("bench_against_trl.py", "--cell", "0.33M-4", "--pairs", "3"), ("0.33M-4: seconds per step against TRL",)),
)


def gather(paths: Sequence[Path], headlines: Sequence[Headline] = HEADLINES) -> list[Row]:
    """The verdict of each headline, in their order; later files win.

    Raises:
        ValueError: no file answers a question, or a file is broken.
    """
    verdicts: Mapping[str, Row] = {
        row["question"]: row for path in paths for row in load(path).rows if kind_of(row).name == "verdict"
    }
    questions = [question for headline in headlines for question in headline.questions]
    if missing := [question for question in questions if question not in verdicts]:
        raise ValueError(
            f"No result answers {missing[0]!r}; read {', '.join(path.name for path in paths) or 'no file'}."
        )
    return [verdicts[question] for question in questions]


def measure() -> Path:
    """Run the benchmarks one after the other, and write their ratios; returns the path.

    Takes about half an hour on two cores.

    Raises:
        ValueError: a result lacks a ratio, or the working tree has changes.
    """
    path = publish("headlines", gather([_run(headline) for headline in HEADLINES]))
    if path is None:
        raise ValueError("Nothing was written: the working tree has changes; commit them.")
    return path


def baseline() -> Path | None:
    """The newest published result of `measure`."""
    return max((path for path in published_results() if path.stem == "headlines"), default=None, key=_date)


def _date(path: Path) -> str:
    return path.parent.name


def _run(headline: Headline) -> Path:
    """Run a benchmark; returns the path of its result, which is the last line in .json."""
    script, *arguments = headline.command
    command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    print(done.stdout, flush=True)
    return Path(next(line for line in reversed(done.stdout.splitlines()) if line.endswith(".json")))
