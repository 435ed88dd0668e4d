"""Measure the ratios that stand for the whole project, and write them as one result.

    uv run --group bench benchmarks/headlines.py [FILE.json ..]

Runs the benchmarks of HEADLINES one after the other with few pairs, about half an hour on two
cores. With files, it takes the ratios from these results instead of measuring them.

All are ratios of two sides of the same run, so that `compare.py --other-hardware` can hold a run on
another machine against the published baseline.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.pairs import publish
from harness.result_schema import Row, kind_of, load
from harness.results import ROOT


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
    Headline(("bench_data_plane_tcp.py", "--pairs", "5"), ("TCP put",)),
    Headline(
        ("bench_metadata.py", "--only", "small,lists", "--rounds", "5"),
        ("kv_put of a small row, p50, 4 clients", "metadata of 65536 keys"),
    ),
    Headline(
        ("bench_controller_bottleneck.py", "--planes", "driver,simple", "--pairs", "3", "--name", "headline"),
        ("step without compute, vl, 256 MiB per step, 4 workers (padded): times faster than driver",),
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


def measure(headline: Headline) -> Path:
    """Run the benchmark; returns the path of its result, which is the last line in .json."""
    script, *arguments = headline.command
    command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    print(done.stdout, flush=True)
    return Path(next(line for line in reversed(done.stdout.splitlines()) if line.endswith(".json")))


def main() -> None:
    """Gather the ratios of the files, or measure them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*")
    files: list[Path] = parser.parse_args().files or [measure(headline) for headline in HEADLINES]
    publish("headlines", gather(files))


if __name__ == "__main__":
    main()
