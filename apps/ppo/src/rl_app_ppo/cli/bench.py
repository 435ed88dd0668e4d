"""`rl bench`: how fast a configuration trains on this machine, measured in a short run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import msgspec
from rich.console import Console

from rl_app_ppo.api.launch import launch
from rl_app_ppo.cli.columns import columns
from rl_app_ppo.config.loading import load_config
from rl_app_ppo.outputs.console import THROUGHPUT, stage_shares
from rl_ckpt_engine import PluginPolicy
from rl_protocol.counted import counted
from rl_protocol.support.temporary_folders import temporary_folder


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """The speed of a run, without its first step.

    Attributes:
        steps: that were measured.
        step_s: seconds of a step, their median.
        tokens_per_s: prompt and response tokens per second, their median.
        stages: share of each stage in the time of a step, their medians, the longest first.
        first_step_s: seconds from the command to the end of the first step.
    """

    steps: int
    step_s: float
    tokens_per_s: float
    stages: dict[str, float]
    first_step_s: float


def bench(
    words: Sequence[str], config_file: Path | None, steps: int, plugins: PluginPolicy, out: Console, before_s: float
) -> Speed:
    """Train one step more than `steps` in a temporary folder, without validation and checkpoints.

    Args:
        words: overrides.
        config_file: YAML settings, or None.
        steps: to measure.
        plugins: which plug-ins of the weight synchronization the operator allows.
        out: where the run prints.
        before_s: seconds since the command was given.

    Raises:
        RLError: as `launch`.
    """
    with temporary_folder("rl-bench-") as folder:
        own = (
            f"trainer.output_dir={folder}",
            "trainer.run_name=bench",
            "trainer.resume_mode=disable",
            "trainer.logger=console",
            f"trainer.total_training_steps={steps + 1}",
            "trainer.total_epochs=0",
            "trainer.test_freq=0",
            "trainer.val_before_train=false",
        )
        config = load_config((*words, *own), config_file)
        result = launch(config, plugins, out, before_s=before_s, steps_only=True)
        return speed_of(result.history)


def speed_of(history: Sequence[Mapping[str, float]]) -> Speed:
    """The speed of the steps after the first, from the metrics of all steps."""
    first, *measured = [metrics for metrics in history if metrics["step"]]
    shares = [dict(stage_shares(metrics)) for metrics in measured]
    stages = {name: median(one.get(name, 0.0) for one in shares) for name in {name for one in shares for name in one}}
    return Speed(
        steps=len(measured),
        step_s=median(metrics["timing_s/step"] for metrics in measured),
        tokens_per_s=median(metrics[THROUGHPUT] for metrics in measured),
        stages=dict(sorted(stages.items(), key=lambda one: -one[1])),
        first_step_s=first["startup_s/first_step"],
    )


def speed_text(speed: Speed) -> str:
    """The speed for people."""
    shares = [(f"  {name}", f"{share:.0%}") for name, share in speed.stages.items() if share >= 0.01]
    return columns(
        [
            ("first step done after", f"{speed.first_step_s:.1f} s"),
            (f"median of {counted(speed.steps, 'step')}", f"{speed.step_s:.2f} s"),
            ("tokens per second", f"{speed.tokens_per_s:,.0f}"),
            *shares,
        ]
    )
