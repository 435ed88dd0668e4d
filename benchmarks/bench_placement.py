"""Compare the demo with all models in one process and with a process for each role.

    uv run benchmarks/bench_placement.py [--pairs 5] [--seeds 0,1,2] [--set KEY=VALUE ..] [--smoke]

Each run is the app's command on a cached base model, and the placements take turns. Reports seconds
from the command to the end of the first step, seconds and CPU seconds per step after it, the peak
of memory, and the accuracy after training with each seed.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.pairs import verdict
from harness.process_tree import LOOK_S, Line, run_command
from harness.results import ROOT, command_line, write_result

from rl_app_ppo.config.loading import load_config
from rl_app_ppo.config.model_path import given_model
from rl_app_ppo.inputs.demo_model import cached_demo_model

SIDES = ("fused", "separate")
TIMEOUT_S = 1200.0
ACCURATE = 0.90
TASK = "data.demo=addition"


@dataclass(frozen=True)
class Run:
    """What one run took.

    Attributes:
        first_step_s: from the command to the end of the first step.
        step_s: seconds per step after the first, without validation.
        cpu_s: CPU seconds of all processes per step after the first, at least LOOK_S in all.
        peak_pss_mib: see CommandRun.
        accuracy: of the last validation.
    """

    first_step_s: float
    step_s: float
    cpu_s: float
    peak_pss_mib: float
    accuracy: float


def run(placement: str, seed: int, overrides: Sequence[str], folder: Path) -> Run:
    """Run the app as a user would.

    Raises:
        RuntimeError: it failed, or trained fewer than two steps.
    """
    command = [sys.executable, str(ROOT / "apps" / "ppo"), f"placement={placement}", f"trainer.seed={seed}"]
    command += [f"trainer.output_dir={folder}", "trainer.run_name=run", "trainer.logger=console", TASK, *overrides]
    lines, log = folder / "run" / "metrics.jsonl", folder / "output.log"
    whole = run_command(command, lines, log, env=os.environ, folder=folder, timeout_s=TIMEOUT_S)
    steps = [line for line in whole.lines if line.record["step"]]
    if len(steps) < 2:
        raise RuntimeError(f"{placement}: a step after the first is needed; {len(steps)} were trained")
    later = steps[1:]
    return Run(
        first_step_s=steps[0].at,
        step_s=statistics.median(line.record["timing_s/step"] for line in later),
        cpu_s=max(steps[-1].cpu - steps[0].cpu, LOOK_S) / len(later),
        peak_pss_mib=whole.peak_pss_mib,
        accuracy=next(found for line in reversed(whole.lines) if (found := accuracy(line)) is not None),
    )


def make_base_model(overrides: Sequence[str]) -> None:
    """Make the demo's base model unless the cache has it, so that no measured run does."""
    config = load_config([TASK, *overrides])
    if given_model(config) is None and cached_demo_model(config) is None:
        with tempfile.TemporaryDirectory() as folder:
            run("fused", 0, [*overrides, "trainer.total_training_steps=2"], Path(folder))


def accuracy(line: Line) -> float | None:
    """The validation accuracy in a line."""
    return next((v for k, v in line.record.items() if re.fullmatch("val-core/.*/acc/mean@1", k)), None)


def verdicts(runs: Mapping[str, Sequence[Run]]) -> list[dict[str, Any]]:
    """The paired ratios, and the least accuracy of each side."""

    def ratio(question: str, of: Callable[[Run], float]) -> dict[str, Any]:
        ratios = [of(one) / of(other) for one, other in zip(runs["fused"], runs["separate"], strict=True)]
        return verdict(
            f"{question}, fused / separate", statistics.median(ratios), 1.0, 0.8, at_least=False, ratios=ratios
        )

    rows = [
        ratio("seconds from the command to the end of the first step", lambda run: run.first_step_s),
        ratio("seconds per step", lambda run: run.step_s),
        ratio("CPU seconds per step", lambda run: run.cpu_s),
        ratio("peak memory", lambda run: run.peak_pss_mib),
    ]
    for side in SIDES:
        least = min(run.accuracy for run in runs[side])
        rows.append(verdict(f"least accuracy of the seeds, {side}", least, ACCURATE, 0.95, at_least=True))
    return rows


def side_row(side: str, runs: Sequence[Run]) -> dict[str, Any]:
    """Medians over the runs of a side, and the accuracy of each."""

    def median(of: Callable[[Run], float]) -> float:
        return float(f"{statistics.median(map(of, runs)):.4g}")

    return {
        "placement": side,
        "first_step_s": median(lambda run: run.first_step_s),
        "step_s": median(lambda run: run.step_s),
        "cpu_s_per_step": median(lambda run: run.cpu_s),
        "peak_pss_mib": median(lambda run: run.peak_pss_mib),
        "accuracies": [run.accuracy for run in runs],
        "pairs": len(runs),
    }


def main() -> None:
    """Run the pairs and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seeds", default="0,1,2", help="the pairs take turns with these")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another override of all runs")
    parser.add_argument("--smoke", action="store_true", help="one pair of 2 steps, nothing written")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.pairs, arguments.set = 1, [*arguments.set, "trainer.total_training_steps=2"]
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    make_base_model(arguments.set)
    runs: dict[str, list[Run]] = {side: [] for side in SIDES}
    for pair in range(arguments.pairs):
        for side in SIDES if pair % 2 else reversed(SIDES):
            with tempfile.TemporaryDirectory() as folder:
                runs[side].append(run(side, seeds[pair % len(seeds)], arguments.set, Path(folder)))
            print(side, runs[side][-1], flush=True)
    rows = [*(side_row(side, found) for side, found in runs.items()), *verdicts(runs)]
    if not arguments.smoke:
        print(write_result("placement", command_line(), rows))


if __name__ == "__main__":
    main()
