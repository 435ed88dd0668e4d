"""Compare a GRPO step with TRL's GRPOTrainer and with a bare PyTorch loop.

    uv run benchmarks/bench_against_trl.py [--cell 27M-64-ragged ..] [--pairs 5]
        [--set KEY=VALUE ..] [--bf16] [--smoke]

The three sides train the same model on the same prompts with the same settings, one process after
the other and in turns, each with all cores. Each cell writes its own result file when it is done,
so an interrupted run continues with the cells that are left (`--cell`). The first use installs TRL
in the user's cache (`peers/trl_environment.py`).

With `--bf16` the sides are the app in bfloat16, with float32 master weights, and in float32.

Seconds per step are those between the ends of steps, as seen from outside, without validation and
the first step. CPU seconds and memory are those of all processes of a side.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import yaml
from harness.grpo_cells import CELLS, SMOKE, Cell, bars, base_model, task_of
from harness.pairs import publish, verdict
from harness.process_tree import LOOK_S, CommandRun, Line, run_command
from harness.results import ROOT, commit
from peers.grpo_task import Task
from peers.trl_environment import NoTRLError, trl_python
from transformers.utils import logging

MEASURED, WARM_UP, SAMPLED = 3, 1, 1
"""Steps; the last one, only of ours in the first pair, writes its responses, to see how long they
are."""
DEMO_STEPS = 30
REACHED = 0.90
"""Accuracy to which the demo is timed."""
TIMEOUT_S = 3600.0
BINS = 8
"""Of the histogram of response lengths."""
SIDES = ("ours", "trl", "floor")
BF16 = ("model_engine=torch", "torch.param_dtype=bfloat16", "rollout.dtype=bfloat16")


@dataclass(frozen=True)
class Run:
    """One run of one side.

    Attributes:
        step_s: seconds per measured step; steps whose lines came in one look at the file count as
            one look, LOOK_S.
        cpu_s: CPU seconds of all processes per measured step, validation in between included; the
            least is that of step_s.
        stages: seconds per measured step by stage; stages may overlap.
        lengths: number of responses by length in tokens, as far as they are known.
        mean_length: tokens per response of the measured steps.
        curve: step -> validation accuracy.
        reached_s: seconds from the command to the accuracy REACHED; None: not reached, or no
            validation.
        settings: what the side says it ran with.
        whole: the command.
    """

    step_s: float
    cpu_s: float
    stages: Mapping[str, float]
    lengths: Counter[int]
    mean_length: float
    curve: Mapping[int, float]
    reached_s: float | None
    settings: Mapping[str, Any]
    whole: CommandRun


def measured(whole: CommandRun, first: int, last: int, settings: Mapping[str, Any], lengths: Counter[int]) -> Run:
    """Read the steps `first` to `last` of a run.

    Raises:
        RuntimeError: the run did not write them.
    """
    steps = {line.record["step"]: line for line in whole.lines}
    missing = [step for step in range(first - 1, last + 1) if step not in steps and step]
    if missing or first < 2:
        raise RuntimeError(f"steps {missing} were not written, or there was no warm-up before step {first}")
    chosen = [steps[step] for step in range(first - 1, last + 1)]
    seconds = [b.at - a.at - b.record.get("timing_s/testing", 0.0) for a, b in pairwise(chosen)]
    stages: dict[str, float] = {}
    for line in chosen[1:]:
        for name, value in line.record.items():
            if name.startswith("timing_s/") and name not in {"timing_s/testing", "timing_s/step"}:
                stages[name[9:]] = stages.get(name[9:], 0.0) + value / len(seconds)
    curve = {step: found for step in range(last + 1) if step in steps and (found := accuracy(steps[step])) is not None}
    return Run(
        step_s=max(statistics.mean(seconds), LOOK_S),
        cpu_s=max(chosen[-1].cpu - chosen[0].cpu, LOOK_S) / len(seconds),
        stages=stages,
        lengths=lengths,
        mean_length=statistics.mean(mean_length(line.record) for line in chosen[1:]),
        curve=curve,
        reached_s=next((steps[step].at for step in sorted(curve) if curve[step] >= REACHED), None),
        settings=settings,
        whole=whole,
    )


def accuracy(line: Line) -> float | None:
    """The validation accuracy in a line."""
    return next((v for k, v in line.record.items() if re.fullmatch("val-core/.*/acc/mean@1", k)), None)


def mean_length(record: Mapping[str, Any]) -> float:
    """Tokens per response in a step."""
    return statistics.mean(record["lengths"]) if "lengths" in record else record["response_length/mean"]


def peer_run(python: Path, module: str, task: Task, folder: Path, first: int) -> Run:
    """Run the bare loop or TRL."""
    task.write(folder / "task.json")
    lines = folder / "lines.jsonl"
    whole = run_command(
        [str(python), "-m", module, str(folder / "task.json"), str(lines)],
        lines,
        folder / "output.log",
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        folder=ROOT / "benchmarks",
        timeout_s=TIMEOUT_S,
    )
    lengths = Counter[int]()
    for line in whole.lines:
        lengths.update(line.record.get("lengths", ()))
    return measured(whole, first, task.steps, whole.lines[0].record["settings"], lengths)


def our_run(task: Task, cell: Cell, more: Sequence[str], folder: Path, first: int, *, sampled: bool) -> Run:
    """Run the app as a user would."""
    steps = task.steps + (SAMPLED if sampled else 0)
    command = [sys.executable, str(ROOT / "apps" / "ppo"), "algorithm=grpo", f"model.path={task.model}"]
    command += [f"{key}={value}" for key, value in our_options(task, steps).items()]
    command += [f"trainer.output_dir={folder}", "trainer.run_name=run"]
    if cell.demo:
        command += ["data.demo=addition", f"trainer.test_freq={task.test_freq}"]
    else:
        command += our_files(task, folder, steps, sampled=sampled)
    whole = run_command(
        [*command, *more],
        folder / "run" / "metrics.jsonl",
        folder / "output.log",
        env=os.environ,
        folder=folder,
        timeout_s=TIMEOUT_S,
    )
    lengths = Counter[int]()
    for file in (folder / "run" / "samples").glob("train-*.jsonl"):
        texts = [json.loads(line)["response"] for line in file.read_text(encoding="utf-8").splitlines()]
        lengths.update(min(len(text) + 1, task.response_length) for text in texts)  # one token per character, and EOS
    config = yaml.safe_load((folder / "run" / "config.yaml").read_text(encoding="utf-8"))
    return measured(whole, first, task.steps, our_settings(config), lengths)


def our_options(task: Task, steps: int) -> Mapping[str, object]:
    """The task in the app's words; what is not named is the app's default."""
    return {
        "data.train_batch_size": task.prompts,
        "rollout.n": task.n,
        "rollout.response_length": task.response_length,
        "rollout.temperature": task.temperature,
        "actor.ppo_mini_batch_size": task.prompts // task.mini_batches,
        "actor.optim.lr": task.lr,
        "actor.optim.lr_warmup_steps": task.lr_warmup_steps,
        "actor.optim.beta1": task.beta1,
        "actor.optim.beta2": task.beta2,
        "actor.optim.weight_decay": task.weight_decay,
        "actor.optim.grad_clip": task.grad_clip,
        "actor.clip_ratio_low": task.clip_low,
        "actor.clip_ratio_high": task.clip_high,
        "actor.clip_ratio_c": task.clip_c,
        **({"actor.kl_loss_coef": task.kl_coef} if task.kl_coef else {"actor.use_kl_loss": "false"}),
        "trainer.total_training_steps": steps,
        "trainer.seed": task.seed,
        "trainer.threads_per_worker": 0,  # all cores, as the other sides have them
        "trainer.save_freq": 0,
        "trainer.logger": "console",
    }


def our_files(task: Task, folder: Path, steps: int, *, sampled: bool) -> list[str]:
    """Write the problems as data files; the options that read them in this order."""

    def rows(name: str, problems: Sequence[tuple[str, str]]) -> Path:
        path = folder / f"{name}.jsonl"
        lines = [
            {
                "prompt": prompt,
                "data_source": "sums",
                "reward_model": {"ground_truth": truth},
                "extra_info": {"index": i},
            }
            for i, (prompt, truth) in enumerate(problems)
        ]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        return path

    options = [f"data.train_files={rows('train', task.train)}", "data.curriculum=sequential"]
    options += ["reward.function=gsm8k_flexible", "trainer.val_before_train=false"]
    if sampled:  # the step after the measured ones writes its responses
        return [*options, f"trainer.test_freq={steps}", f"data.val_files={rows('val', task.train[:1])}"]
    return [*options, "trainer.test_freq=0"]


def our_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in the run's resolved configuration; names as in `Task.settings`."""
    actor, rollout, trainer = config["actor"], config["rollout"], config["trainer"]
    optim = actor["optim"]
    return {
        "prompts": config["data"]["train_batch_size"],
        "n": rollout["n"],
        "rows_per_mini_batch": actor["ppo_mini_batch_size"] * rollout["n"],
        "response_length": rollout["response_length"],
        "lr": optim["lr"],
        "lr_warmup_steps": optim["lr_warmup_steps"],
        "betas": [optim["beta1"], optim["beta2"]],
        "weight_decay": optim["weight_decay"],
        "grad_clip": optim["grad_clip"],
        "clip": [actor["clip_ratio_low"], actor["clip_ratio_high"], actor["clip_ratio_c"]],
        "kl_loss": [actor["kl_loss_type"], actor["kl_loss_coef"]] if actor["use_kl_loss"] else None,
        "loss_agg_mode": actor["loss_agg_mode"],
        "epochs": actor["ppo_epochs"],
        "temperature": rollout["temperature"],
        "top_p": rollout["top_p"],
        "top_k": rollout["top_k"],
        "seed": trainer["seed"],
        "dtype": rollout["dtype"],
        "torch": torch.__version__,
        "threads": {
            "threads_per_worker": trainer.get("threads_per_worker"),
            "rollout.num_workers": rollout.get("num_workers"),
        },
        "adamw": "fused",
        "advantage_eps": 1e-6,
        "old_log_prob_pass": config["algorithm"]["old_log_prob"],
    }


def require_equal(side: str, run: Run, task: Task) -> None:
    """Raise RuntimeError if a setting of the run that must be that of the task is another."""
    for name, wanted in task.settings().items():
        found = run.settings.get(name)
        if found != wanted and (name, side) != ("steps", "ours"):
            raise RuntimeError(f"{side} ran with {name}={found!r}, and {wanted!r} was asked")


def beside(runs: Mapping[str, Sequence[Run]]) -> dict[str, dict[str, Any]]:
    """The settings of all sides beside each other, of the first pair."""
    names = dict.fromkeys(name for found in runs.values() for name in found[0].settings)
    return {name: {side: found[0].settings.get(name) for side, found in runs.items()} for name in names}


def side_row(cell: str, side: str, runs: Sequence[Run]) -> dict[str, Any]:
    """What one side took: medians over the pairs."""

    def median(of: Callable[[Run], float]) -> float:
        return float(f"{statistics.median(of(run) for run in runs):.4g}")

    stages = {name: median(lambda run, name=name: run.stages.get(name, 0.0)) for name in runs[0].stages}
    lengths = sum((run.lengths for run in runs), Counter[int]())
    reached = [run.reached_s for run in runs if run.reached_s is not None]
    return {
        "cell": cell,
        "side": side,
        "step_s": median(lambda run: run.step_s),
        **{f"{name}_s": stages.get(name) for name in ("gen", "old_log_prob", "ref", "update_actor")},
        "cpu_s_per_step": median(lambda run: run.cpu_s),
        "peak_pss_mib": median(lambda run: run.whole.peak_pss_mib),
        "reached_s": statistics.median(reached) if len(reached) == len(runs) else None,
        "command_s": median(lambda run: run.whole.seconds),
        "command_cpu_s": median(lambda run: run.whole.cpu),
        "tokens_per_response": median(lambda run: run.mean_length),
        "stages": stages,
        "lengths": histogram(lengths),
        "curve": {step: median(lambda run, step=step: run.curve[step]) for step in runs[0].curve},
        "pairs": len(runs),
        "every_step_s": [run.step_s for run in runs],
    }


def histogram(lengths: Counter[int]) -> list[list[float]]:
    """[longest of the bin, share of the responses] of BINS equal bins up to the longest."""
    total, longest = sum(lengths.values()), max(lengths, default=0)
    if not total:
        return []
    edges = [longest * (i + 1) / BINS for i in range(BINS)]
    shares = [
        sum(n for length, n in lengths.items() if below < length <= edge) for below, edge in pairwise([0, *edges])
    ]
    return [[edge, share / total] for edge, share in zip(edges, shares, strict=True)]


def verdicts(name: str, cell: Cell, runs: Mapping[str, Sequence[Run]]) -> list[dict[str, Any]]:
    """The ratios that have a bar, medians over the pairs."""

    def ratio(question: str, of: Callable[[Run], float], peer: str, bar: tuple[float, float]) -> dict[str, Any]:
        ratios = [of(a) / of(b) for a, b in zip(runs["ours"], runs[peer], strict=True)]
        return verdict(f"{name}: {question}", statistics.median(ratios), *bar, at_least=False, ratios=ratios)

    bar = bars(cell)
    rows = [ratio("seconds per step against the bare floor", lambda run: run.step_s, "floor", bar["floor"])]
    if "trl" not in runs:
        return rows
    rows.append(ratio("seconds per step against TRL", lambda run: run.step_s, "trl", bar["trl"]))
    rows.append(ratio("CPU seconds per step against TRL", lambda run: run.cpu_s, "trl", bar["cpu"]))
    if cell.demo:
        unreached = {side: found for side, found in runs.items() if any(run.reached_s is None for run in found)}
        if unreached:
            raise RuntimeError(f"no accuracy of {REACHED} in a run of {', '.join(unreached)}: they do not learn alike")
        rows.append(
            ratio(f"command to accuracy {REACHED} against TRL", lambda run: run.reached_s or 0.0, "trl", (0.7, 0.4))
        )
        curves = {side: side_row(name, side, found)["curve"] for side, found in runs.items()}
        apart = statistics.mean(abs(curves["ours"][step] - curves["trl"][step]) for step in curves["trl"])
        rows.append(
            verdict(f"{name}: mean distance of the accuracy curves, ours and TRL", apart, 0.05, 0.03, at_least=False)
        )
    return rows


def compare(
    name: str, cell: Cell, pairs: int, trl: Path | None, more: Sequence[str], *, smoke: bool
) -> list[dict[str, Any]]:
    """Run all sides of a cell in turns; the rows of its result."""
    steps = DEMO_STEPS if cell.demo else WARM_UP + (1 if smoke else MEASURED)
    sides = [side for side in SIDES if side != "trl" or trl is not None]
    runs: dict[str, list[Run]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as temporary:
        model = base_model(cell, Path(temporary) / "model")
        for pair in range(pairs):
            task = task_of(cell, model, steps, seed=pair)
            for side in sides if pair % 2 else sides[::-1]:
                folder = Path(temporary) / f"{side}-{pair}"
                folder.mkdir()
                if side == "ours":
                    sampled = not pair and not cell.demo
                    run = our_run(task, cell, more, folder, WARM_UP + 1, sampled=sampled)
                elif side == "trl" and trl is not None:
                    run = peer_run(trl, "peers.trl_grpo", task, folder, WARM_UP + 1)
                else:
                    run = peer_run(Path(sys.executable), "peers.bare_grpo", task, folder, WARM_UP + 1)
                require_equal(side, run, task)
                runs[side].append(run)
                stages = " ".join(f"{stage} {seconds:.3g}" for stage, seconds in run.stages.items())
                print(
                    f"{name} pair {pair + 1} {side}: {run.step_s:.3g} s/step ({stages}), {run.cpu_s:.3g} CPU s",
                    flush=True,
                )
    rows = verdicts(name, cell, runs)
    rows[0]["settings"] = beside(runs)
    return [*rows, *(side_row(name, side, found) for side, found in runs.items())]


def compare_dtypes(name: str, cell: Cell, pairs: int, more: Sequence[str]) -> list[dict[str, Any]]:
    """Run a cell in bfloat16 and in float32 in turns; the rows of its result."""
    runs: dict[str, list[Run]] = {"bfloat16": [], "float32": []}
    with tempfile.TemporaryDirectory() as temporary:
        model = base_model(cell, Path(temporary) / "model")
        for pair in range(pairs):
            task = task_of(cell, model, WARM_UP + MEASURED, seed=pair)
            for side in runs if pair % 2 else reversed(runs):
                folder = Path(temporary) / f"{side}-{pair}"
                folder.mkdir()
                options = [*more, *(BF16 if side == "bfloat16" else ())]
                run = our_run(task, cell, options, folder, WARM_UP + 1, sampled=False)
                runs[side].append(run)
                print(f"{name} pair {pair + 1} {side}: {run.step_s:.3g} s/step, {run.cpu_s:.3g} CPU s", flush=True)
    ratios = [a.step_s / b.step_s for a, b in zip(runs["bfloat16"], runs["float32"], strict=True)]
    question = f"{name}: seconds per step in bfloat16 against float32"
    rows = [verdict(question, statistics.median(ratios), 0.8, 0.4, at_least=False, ratios=ratios)]
    return [*rows, *(side_row(name, side, found) for side, found in runs.items())]


def main() -> None:
    """Compare the chosen cells."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", action="append", choices=CELLS, help="only this cell; may be repeated")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="another override of the app's runs"
    )
    parser.add_argument("--bf16", action="store_true", help="the app in bfloat16 against float32, without peers")
    parser.add_argument("--smoke", action="store_true", help="a tiny cell, TRL only if uv's cache has it")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    if not arguments.smoke and commit().endswith("-dirty"):
        print("no result will be written: the working tree has changes", file=sys.stderr)
    if arguments.bf16:
        for name in arguments.cell or ("27M-64-equal", "110M-64-equal"):
            publish(f"bf16_{name}", compare_dtypes(name, CELLS[name], arguments.pairs, arguments.set))
        return
    trl: Path | None = None
    try:
        trl = trl_python(offline=arguments.smoke)
    except (NoTRLError, subprocess.TimeoutExpired) as error:
        if not arguments.smoke:
            raise
        print(f"without TRL: {error}", flush=True)
    if arguments.smoke:
        compare("smoke", SMOKE, 1, trl, arguments.set, smoke=True)
        return
    for name in arguments.cell or CELLS:
        publish(f"against_trl_{name}", compare(name, CELLS[name], arguments.pairs, trl, arguments.set, smoke=False))


if __name__ == "__main__":
    main()
