"""Disturb runs by `rl chaos`, and keep how each of them ended.

    uv run benchmarks/bench_chaos.py [--runs 10] [--seed 22] [--at-a-time 1]
        [--without-model] [--smoke]

The results of several sessions are one collection: a session repeats first the runs whose last
repetition failed, then makes those that no result file has, the lowest numbers first. It writes
`chaos_app.json` (`chaos_plane.json` with `--without-model`) of its commit after each run, so that
it may be stopped at any time. RESULTS.md counts the last repetition of each run, and lists all that
failed (harness/chaos_runs.py). Exit code 1: a run failed.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from harness.chaos_runs import NAME, planned, runs_of, to_row
from harness.result_schema import load
from harness.results import RESULTS, command_line, commit, result_path, write_result
from rich.console import Console

from rl_app_ppo.chaos.command import PACES, run_each
from rl_app_ppo.chaos.judge import Kind
from rl_app_ppo.chaos.schedule import make_schedule
from rl_protocol import RLError

HIGHEST = 1000
"""Runs of a seed that are looked through for missing ones."""


def make_runs(kind: Kind, seed: int, runs: int, at_a_time: int, *, write: bool) -> bool:
    """Make up to `runs` runs, `at_a_time` at once; returns whether all were survived.

    Raises:
        RLError: the application fails without faults.
        ValueError: a result file is broken.
    """
    documents = [load(path) for path in sorted(RESULTS.glob(f"*/*/{NAME}*.json"))] if write else []
    schedules = [make_schedule(seed, number, PACES[kind]) for number in range(HIGHEST)]
    todo = planned(runs_of(documents), kind, schedules)[:runs]
    path = result_path(NAME + kind)
    rows = load(path).rows if path.exists() else []
    folder, good = Path(tempfile.mkdtemp(prefix="rl-chaos-")), True
    for outcome in run_each(todo, kind, folder, Console(highlight=False), at_a_time):
        good = good and outcome.good
        rows.append(to_row(outcome))
        if write:
            load(write_result(NAME + kind, command_line(), rows))
    if good:
        shutil.rmtree(folder)
    else:
        print(f"the folders of the failed runs are in {folder}")
    return good


def main() -> int:
    """Collect runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10, help="at most, in this session")
    parser.add_argument("--seed", type=int, default=22)
    parser.add_argument("--at-a-time", type=int, default=1, help="runs at once")
    parser.add_argument("--without-model", action="store_true", help="a stand-in takes the place of models and Ray")
    parser.add_argument("--smoke", action="store_true", help="two runs without model, nothing written")
    arguments = parser.parse_args()
    if not arguments.smoke and commit().endswith("-dirty"):
        print("The working tree has changes, so that the code of the runs has no name; commit them.", file=sys.stderr)
        return 2
    kind: Kind = "plane" if arguments.without_model or arguments.smoke else "app"
    runs = 2 if arguments.smoke else arguments.runs
    try:
        good = make_runs(kind, arguments.seed, runs, arguments.at_a_time, write=not arguments.smoke)
    except (RLError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
