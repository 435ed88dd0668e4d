"""Check that a demo learns with every seed, with GRPO and PPO, and time it.

    uv run benchmarks/bench_learning.py [--seeds 0,1,2,3,4] [--algorithms grpo,ppo]
        [--vary trainer.seed] [--steps N] [--set KEY=VALUE ..] [--smoke]
    uv run benchmarks/bench_learning.py --tool [--seeds 0,1,2]  # the demo with and without its tool

Runs the app as a user would, one process after the other, with a separate cache, so that the first
run of a data seed includes its warm-up. The task is addition with the units first, to compare with
published results; `--set data.demo=sums` is the default task. Writes JSON and a plot of the curves.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness.results import ROOT, command_line, write_result
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

WITH_AND_WITHOUT = ([], ["rollout.session=single_turn"])
"""Overrides of the preset grpo_calculator: with its tool, and without any."""


def run(algorithm: str, overrides: list[str], folder: Path, *, warm_up: bool = True) -> dict[str, Any]:
    """Run the app once; without `warm_up`, reuse the base model in the user's cache.

    Raises:
        RuntimeError: the run failed.
    """
    output = Path(tempfile.mkdtemp(dir=folder))
    demo = ["data.demo=addition"] if algorithm in ("grpo", "ppo") else []
    command = [sys.executable, str(ROOT / "apps" / "ppo"), f"algorithm={algorithm}", *demo, *overrides]
    command += [f"trainer.output_dir={output}", "trainer.run_name=run"]
    command += [f"model.cache_dir={folder / 'cache'}"] if warm_up else []
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(f"{' '.join([algorithm, *overrides])} ended with {done.returncode}: {done.stderr}")
    lines = [json.loads(line) for line in (output / "run" / "metrics.jsonl").read_text().splitlines()]
    curve = [(m["step"], m[name]) for m in lines for name in m if re.fullmatch("val-core/.*/acc/mean@1", name)]
    trained = [m for m in lines if m["step"]]
    return {
        "algorithm": algorithm,
        "overrides": overrides,
        "seconds": round(seconds, 1),
        "warm_up": "supervised warm-up took" in done.stdout,
        "base_accuracy": curve[0][1],
        "final_accuracy": curve[-1][1],
        "steps": trained[-1]["step"],
        "seconds_per_step": sorted(m["timing_s/step"] for m in trained)[len(trained) // 2],
        "driver_bytes_per_step_max": max(m["perf/driver_bytes"] for m in trained),
        "rollout_log_probs_diff_max": max(m["training/rollout_log_probs_diff_max"] for m in trained),
        "curve": curve,
    }


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """One panel per algorithm, one line per run."""
    algorithms = list(dict.fromkeys(row["algorithm"] for row in rows))
    figure = Figure(figsize=(5 * len(algorithms), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(algorithms), squeeze=False, sharey=True)[0]
    for axis, algorithm in zip(axes, algorithms, strict=True):
        for row in rows:
            if row["algorithm"] == algorithm:
                axis.plot(*zip(*row["curve"], strict=True), marker=".", label=" ".join(row["overrides"]))
        axis.axhline(0.85, color="grey", linewidth=0.8, linestyle="--")
        axis.set(title=algorithm, xlabel="step", ylabel="validation accuracy", ylim=(0, 1.02))
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run all and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--algorithms", default="grpo,ppo")
    parser.add_argument(
        "--vary",
        default="trainer.seed",
        help="keys that get the seed, comma-separated: trainer.seed, or trainer.seed,data.seed",
    )
    parser.add_argument("--steps", type=int, default=0, help="0: as many as the app's default")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="another override of all runs; the first one names the result",
    )
    parser.add_argument("--tool", action="store_true", help="the demo with a tool, and the same without it")
    parser.add_argument("--smoke", action="store_true", help="one seed, GRPO, 2 steps, nothing written")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.seeds, arguments.algorithms, arguments.steps = "0", "grpo", 2
    rows: list[dict[str, Any]] = []
    algorithms = ["grpo_calculator"] if arguments.tool else arguments.algorithms.split(",")
    with tempfile.TemporaryDirectory() as folder:
        for algorithm, more in itertools.product(algorithms, WITH_AND_WITHOUT if arguments.tool else ([],)):
            for seed in arguments.seeds.split(","):
                overrides = [f"{key}={seed}" for key in arguments.vary.split(",")]
                extra = [f"trainer.total_training_steps={arguments.steps}"] if arguments.steps else []
                given = [*overrides, *more, *extra, *arguments.set]
                rows.append(run(algorithm, given, Path(folder), warm_up=not arguments.smoke))
                print({k: v for k, v in rows[-1].items() if k != "curve"}, flush=True)
    if arguments.smoke:
        return
    varied = "_".join(key.partition(".")[0] for key in arguments.vary.split(","))
    name = "learning_tool" if arguments.tool else f"learning_{varied}_seeds"
    path = write_result("_".join([name, *map(_short, arguments.set[:1])]), command_line(), rows)
    plot(rows, path.with_suffix(".png"))
    print(path)


def _short(pair: str) -> str:
    """The value of KEY=VALUE, after the last part of the key where it is a number."""
    key, _, value = pair.partition("=")
    return f"{key.rpartition('.')[2]}_{value}" if value.isdigit() else value


if __name__ == "__main__":
    main()
