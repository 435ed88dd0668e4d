"""Check that a demo learns with every seed, with GRPO and PPO, and time it.

    uv run benchmarks/bench_learning.py [--seeds 0,1,2,3,4] [--algorithms grpo,ppo]
        [--vary trainer.seed] [--steps N] [--set KEY=VALUE ..] [--smoke]
    uv run benchmarks/bench_learning.py --tool [--seeds 0,1,2]  # the demo with and without its tool
    uv run benchmarks/bench_learning.py --teacher [--seeds 0,1,2]  # on-policy distillation and GRPO
    uv run benchmarks/bench_learning.py --methods  # one run with each of METHODS

Runs the app as a user would, one process after the other, with a separate cache, so that the first
run of a data seed includes its warm-up. The task is addition with the units first, to compare with
published results; `--set data.demo=sums` is the default task. Writes JSON and a plot of the curves.

With `--teacher` the task is the default one. A student starts from the weights from which GRPO has
made its teacher, and sees the same prompts; compared are the steps that both need to an accuracy of
0.90.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness.pairs import publish, verdict
from harness.results import ROOT, command_line, write_result
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

WITH_AND_WITHOUT = ([], ["rollout.session=single_turn"])
"""Overrides of the preset grpo_calculator: with its tool, and without any."""
DIFF = "training/rollout_log_probs_diff_max"
"""Not measured where no ratio of log-probs is in the loss."""
GOOD = 0.90
"""Accuracy to which the steps of a student and its teacher are counted."""
TEACHER = 0.95
"""Least accuracy of a teacher."""
_PER_RESPONSE = "actor.loss_agg_mode=seq-mean-token-mean"
METHODS = {
    "grpo": [],
    "dro": ["actor.policy_loss.loss_mode=dro"],
    "topr": ["actor.policy_loss.loss_mode=topr"],
    "kimi_k15": ["actor.policy_loss.loss_mode=kimi_k15", _PER_RESPONSE],
    "luspo": ["actor.policy_loss.loss_mode=luspo", _PER_RESPONSE],
    "vespo": ["actor.policy_loss.loss_mode=vespo"],
    "maxrl": ["algorithm.adv_estimator=maxrl"],
    "rae": ["algorithm.adv_estimator=rae"],
    "raft": ["algorithm.adv_estimator=raft", "actor.policy_loss.loss_mode=gpg"],
    "m2po": [
        "algorithm.old_log_prob=recompute",
        "algorithm.rollout_correction.rollout_rs=batch_m2",
        "algorithm.rollout_correction.rollout_rs_threshold=0.04",
    ],
}
"""Losses and estimators -> overrides of GRPO's settings, which are tuned for none of them."""


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
        "rollout_log_probs_diff_max": max((m[DIFF] for m in trained if DIFF in m), default=None),
        "curve": curve,
    }


def distill(seed: str, more: list[str], folder: Path) -> dict[str, Any]:
    """Train a teacher with GRPO, and a student with it; returns the steps of both.

    Raises:
        RuntimeError: a run failed, or the teacher is not good enough.
    """
    shared = ["data.demo=sums", f"trainer.seed={seed}", "trainer.test_freq=1", *more]
    teacher = run("grpo", shared, folder / "teacher")
    if teacher["final_accuracy"] < TEACHER:
        raise RuntimeError(f"the teacher of seed {seed} has an accuracy of {teacher['final_accuracy']}")
    (checkpoint,) = (folder / "teacher").glob("*/run/checkpoint")
    most = _steps_to(GOOD, teacher["curve"])
    steps = ["trainer.total_training_steps=" + str(most)]
    student = run("opd", [*shared, f"reference.path={checkpoint}", *steps], folder / "student")
    if student["base_accuracy"] != teacher["base_accuracy"]:
        raise RuntimeError(f"the runs of seed {seed} do not start from the same weights")
    needed = _steps_to(GOOD, student["curve"])
    return {"seed": int(seed), "grpo_steps": most, "opd_steps": needed, "teacher": teacher, "student": student}


def _steps_to(accuracy: float, curve: list[tuple[int, float]]) -> int:
    found = next((step for step, reached in curve if reached >= accuracy), None)
    if found is None:
        raise RuntimeError(f"an accuracy of {accuracy} was not reached: {curve}")
    return found


def distillation(seeds: list[str], more: list[str]) -> list[dict[str, Any]]:
    """The rows of the result of `--teacher`."""
    runs: list[dict[str, Any]] = []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            for side in ("teacher", "student"):
                Path(folder, side).mkdir()
            runs.append(distill(seed, more, Path(folder)))
            print({name: runs[-1][name] for name in ("seed", "grpo_steps", "opd_steps")}, flush=True)
    ratios = [its["opd_steps"] / its["grpo_steps"] for its in runs]
    question = f"steps to accuracy {GOOD} with on-policy distillation against GRPO, median of {len(runs)} seeds"
    return [verdict(question, statistics.median(ratios), 0.5, 0.25, at_least=False, ratios=ratios, runs=runs)]


def methods(more: list[str]) -> list[dict[str, Any]]:
    """The rows of the result of `--methods`."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, overrides in METHODS.items():
            its = run("grpo", ["data.demo=sums", *overrides, *more], Path(folder), warm_up=False)
            question = f"{name}: accuracy after {its['steps']} steps, {its['base_accuracy']:.3f} before"
            rows.append(verdict(question, its["final_accuracy"], 0.85, 0.95, at_least=True, run=its))
    return rows


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
    parser.add_argument("--teacher", action="store_true", help="on-policy distillation against GRPO")
    parser.add_argument("--methods", action="store_true", help=f"one run with each of {', '.join(METHODS)}")
    parser.add_argument("--smoke", action="store_true", help="one seed, GRPO, 2 steps, nothing written")
    arguments = parser.parse_args()
    if arguments.teacher:
        publish("learning_distillation", distillation(arguments.seeds.split(","), arguments.set))
        return
    if arguments.methods:
        publish("learning_methods", methods(arguments.set))
        return
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
