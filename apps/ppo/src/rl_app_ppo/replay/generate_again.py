"""Replays a step by a run from the checkpoint before it, which generates everything again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from rl_app_ppo.api.launch import launch
from rl_app_ppo.config.schema import AppConfig
from rl_app_ppo.outputs.run_folder import RunFiles
from rl_app_ppo.replay.differences import COMPUTED, metric_differences
from rl_app_ppo.replay.outcome import Outcome, steps_of
from rl_ckpt_engine import PluginPolicy
from rl_protocol.support.temporary_folders import temporary_folder
from rl_trainer.checkpoints.checkpoint_folder import Checkpoint, inspect, step_name

_NEVER = 1 << 31
"""trainer.test_freq of a run that validates after its last step alone."""


def generate_again(
    files: RunFiles, config: AppConfig, before: Checkpoint | None, step: int, plugins: PluginPolicy, progress: Console
) -> Outcome:
    """Compute the steps after a checkpoint up to this one, and compare them with the run.

    Raises:
        RLError: the replayed run failed.
    """
    after = before.manifest.step if before is not None else 0
    with temporary_folder("rl-replay-") as folder:
        wanted = replayed(config, before, step, folder)
        again = RunFiles(folder=launch(wanted, plugins, progress).run_folder)
        run, other = steps_of(files), steps_of(again)
        differ = [
            line for one in range(after + 1, step + 1) for line in metric_differences(one, run.get(one, {}), other[one])
        ]
        return Outcome(
            step=step,
            after=after,
            source="generated again",
            metrics=sum(name.startswith(COMPUTED) for name in other[step]),
            weights=_weights(files, again, step),
            differences=differ,
        )


def replayed(config: AppConfig, before: Checkpoint | None, step: int, folder: Path) -> AppConfig:
    """The configuration that computes the steps after a checkpoint up to this one."""
    quiet = without_outputs(config, folder)
    trainer = replace(
        quiet.trainer,
        resume_mode=str(before.folder.resolve()) if before is not None else "disable",
        total_training_steps=step,
        total_epochs=0,
    )
    return replace(quiet, trainer=trainer)


def without_outputs(config: AppConfig, folder: Path) -> AppConfig:
    """The configuration of a run that writes nothing but what must be compared, to this folder."""
    trainer = replace(
        config.trainer,
        output_dir=str(folder),
        run_name="replay",
        resume_mode="disable",
        val_before_train=False,
        test_freq=_NEVER if config.holds_out else 0,  # with 0, the rows that were held out would be trained on
        save_freq=0,
        sample_freq=0,
        keep_batches=0,
        logger=("console",),
    )
    plane = replace(config.transfer_queue, durability="off", journal_dir="", verify=False)
    return replace(config, trainer=trainer, transfer_queue=plane)


def _weights(run: RunFiles, replay: RunFiles, step: int) -> bool | None:
    """Whether parameters and optimizer states after the step are equal; None: the run has none."""
    one, other = (inspect(files.checkpoints / step_name(step)) for files in (run, replay))
    if not isinstance(one, Checkpoint) or not isinstance(other, Checkpoint):
        return None
    tensors: list[Mapping[str, object]] = [
        {name: facts for name, facts in found.manifest.files.items() if name.endswith(".safetensors")}
        for found in (one, other)
    ]
    return tensors[0] == tensors[1]
