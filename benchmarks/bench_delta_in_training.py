"""Measure how many weights a training step changes and what sending only those costs.

    uv run benchmarks/bench_delta_in_training.py [--lrs 1e-6,3e-6,1e-5,1e-4] [--steps 20]
        [--set KEY=VALUE ..] [--smoke]

Runs the app with rollout in bfloat16 and engine delta-shm, once for each learning rate, and reads
the report of each sync: the share of elements whose bits changed, and the bytes sent. `ideal` is a
16-bit gap and a 16-bit value for each changed element. The first sync of a run sends everything and
is left out. Writes JSON and a plot of the share by step.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from harness.pairs import verdict
from harness.results import ROOT, command_line, write_result
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

GAP_BYTES, VALUE_BYTES = 2, 2
MOST_OF_IDEAL, MOST_OF_FULL, AT_SHARE = 1.2, 0.10, 0.03


def run(lr: str, steps: int, more: list[str], folder: Path) -> dict[str, Any]:
    """Run the app once; return the reports of its syncs.

    Raises:
        RuntimeError: the run failed.
    """
    overrides = {
        "actor.optim.lr": lr,
        "rollout.dtype": "bfloat16",
        "checkpoint_engine.backend": "delta-shm",
        "trainer.total_training_steps": steps,
        "data.demo": "addition",
        "trainer.test_freq": 0,
        "trainer.val_before_train": "false",
        "trainer.output_dir": folder,
        "trainer.run_name": f"lr{lr}",
    }
    command = [
        sys.executable,
        str(ROOT / "apps" / "ppo"),
        *(f"{key}={value}" for key, value in overrides.items()),
        *more,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode:
        raise RuntimeError(f"lr={lr} ended with {done.returncode}: {done.stderr}")
    lines = [json.loads(line) for line in (folder / f"lr{lr}" / "metrics.jsonl").read_text().splitlines()]
    return row(lr, [line for line in lines if "weight_sync/delta_bytes" in line][1:])


def row(lr: str, syncs: list[dict[str, float]]) -> dict[str, Any]:
    """Summary over the syncs of one run, without the first."""
    of_ideal = [
        sync["weight_sync/delta_bytes"] / ideal_bytes(sync) for sync in syncs if sync["weight_sync/changed_share"]
    ]
    sparse = [sync for sync in syncs if sync["weight_sync/changed_share"] <= AT_SHARE]
    return {
        "learning_rate": lr,
        "delta_syncs": len(syncs),
        "full_bytes": syncs[0]["weight_sync/bytes"],
        "changed_share_median": median(sync["weight_sync/changed_share"] for sync in syncs),
        "changed_share_max": max(sync["weight_sync/changed_share"] for sync in syncs),
        "delta_bytes_median": median(sync["weight_sync/delta_bytes"] for sync in syncs),
        "of_ideal_max": max(of_ideal, default=0.0),
        "of_full_max": max(of_full(sync) for sync in syncs),
        "sparse_syncs": len(sparse),
        "of_full_max_where_sparse": max(map(of_full, sparse), default=None),
        "changed_share": [sync["weight_sync/changed_share"] for sync in syncs],
    }


def ideal_bytes(sync: dict[str, float]) -> float:
    """A gap and a value for each changed element."""
    elements = sync["weight_sync/bytes"] / VALUE_BYTES
    return sync["weight_sync/changed_share"] * elements * (GAP_BYTES + VALUE_BYTES)


def of_full(sync: dict[str, float]) -> float:
    """Bytes sent as a share of a full sync."""
    return sync["weight_sync/delta_bytes"] / sync["weight_sync/bytes"]


def verdicts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per bar over all runs; the second only if a sync changed few enough elements."""
    largest = max(row["of_ideal_max"] for row in rows)
    judged = [verdict("largest delta sync, of its ideal size", largest, MOST_OF_IDEAL, 1, at_least=False)]
    sparse = [row["of_full_max_where_sparse"] for row in rows if row["sparse_syncs"]]
    if sparse:
        question = f"largest delta sync at <= {AT_SHARE:.0%} changed, of full"
        judged.append(verdict(question, max(sparse), MOST_OF_FULL, 0.06, at_least=False))
    return judged


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Share of changed elements by step, one line per learning rate."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for row in rows:
        axis.plot(
            range(2, 2 + row["delta_syncs"]), row["changed_share"], marker=".", label=f"lr {row['learning_rate']}"
        )
    axis.set(xlabel="step", ylabel="share of bfloat16 elements changed", yscale="log")
    axis.legend(fontsize=7)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run all and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lrs", default="1e-6,3e-6,1e-5,1e-4")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="another override of all runs of the app"
    )
    parser.add_argument("--smoke", action="store_true", help="one learning rate, 3 steps, nothing written")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.lrs, arguments.steps = "1e-6", 3
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for lr in arguments.lrs.split(","):
            rows.append(run(lr, arguments.steps, arguments.set, Path(folder)))
            print({k: v for k, v in rows[-1].items() if k != "changed_share"}, flush=True)
    judged = verdicts(rows)
    if arguments.smoke:
        return
    path = write_result("delta_in_training", command_line(), [*judged, *rows])
    plot(rows, path.with_suffix(".png"))
    print(path)


if __name__ == "__main__":
    main()
