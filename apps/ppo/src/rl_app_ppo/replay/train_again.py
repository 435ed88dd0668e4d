"""Replays a step by training its kept batch again, from the checkpoint before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from rl_app_ppo.api.event_loop import interrupts_deferred, run_interruptibly
from rl_app_ppo.api.launch import launched
from rl_app_ppo.checks.facts import Facts
from rl_app_ppo.checks.registry import preflight
from rl_app_ppo.config.full_keys import full_keys_in_errors
from rl_app_ppo.config.loading import read_config
from rl_app_ppo.config.schema import AppConfig
from rl_app_ppo.inputs.input_files import InputFiles
from rl_app_ppo.outputs.console import Screen
from rl_app_ppo.outputs.run_folder import RunFiles
from rl_app_ppo.outputs.run_journal import weight_settings
from rl_app_ppo.replay.differences import Difference, metric_differences, weight_differences
from rl_app_ppo.replay.generate_again import without_outputs
from rl_app_ppo.replay.outcome import Outcome, steps_of
from rl_ckpt_engine import PluginPolicy
from rl_protocol import ConfigError
from rl_protocol.support.temporary_folders import temporary_folder
from rl_trainer.checkpoints.checkpoint_folder import CONFIG, Checkpoint, inspect, newest_whole, step_name
from rl_trainer.checkpoints.kept_batches import KeptBatch, kept_steps, read_batch
from rl_trainer.driver.updates.batch_files import Retrained


@dataclass(frozen=True, kw_only=True)
class TrainAgain:
    """What is trained again."""

    config: AppConfig
    """That of the step, which may not be that of the run any more."""
    before: Checkpoint | None
    """The state before the first step; None: the beginning."""
    batches: Sequence[KeptBatch]
    """Of the steps after it, up to the one to replay."""


def plan(files: RunFiles, step: int) -> TrainAgain | Sequence[int]:
    """Plan to train a step again; or the steps after the checkpoint before it that are not kept.

    Raises:
        ConfigError: a batch is damaged, or a setting has changed between the steps.
    """
    before = checkpoint_before(files, step)
    wanted = range((before.manifest.step if before is not None else 0) + 1, step + 1)
    if missing := sorted(set(wanted).difference(kept_steps(files.batches))):
        return missing
    batches = [read_batch(files.batches, one) for one in wanted]
    config = kept_config(files, step)
    own = weight_settings(config)
    for one in wanted[:-1]:
        other = weight_settings(kept_config(files, one))
        if changed := sorted(key for key in own if other.get(key) != own[key]):
            raise ConfigError(
                f"Step {step} can't be trained again from step {wanted[0]}: {changed[0]} was {other.get(changed[0])!r} in step {one} and is "
                f"{own[changed[0]]!r} in step {step}. Set trainer.save_freq so that there is a checkpoint between the two."
            )
    return TrainAgain(config=config, before=before, batches=batches)


def checkpoint_before(files: RunFiles, step: int) -> Checkpoint | None:
    """The newest whole checkpoint before a step; where the run has none, the one that it has
    started from; None: the beginning.

    A run that was resumed has only said in its first batch where it has started from.

    Raises:
        ConfigError: the run has started from a checkpoint that is not whole any more.
    """
    found, _ = newest_whole(files.checkpoints, before=step)
    if found is not None:
        return found
    configs = [files.config, *(files.batches / step_name(one) / CONFIG for one in kept_steps(files.batches)[:1])]
    modes = [read_config(path).trainer.resume_mode for path in configs]
    origin = next((mode for mode in modes if mode not in ("auto", "disable")), None)
    if origin is None:
        return None
    given = inspect(Path(origin).expanduser().resolve())
    if isinstance(given, str):
        raise ConfigError(
            f"The run {files.folder} has started from {origin} (trainer.resume_mode), which can't be used: {given}."
        )
    return given


def kept_config(files: RunFiles, step: int) -> AppConfig:
    """The configuration of a step whose batch is kept."""
    return read_config(files.batches / step_name(step) / CONFIG)


def train_again(files: RunFiles, planned: TrainAgain, plugins: PluginPolicy, progress: Console) -> Outcome:
    """Train the batches again, and compare losses and weights of each step with those of the run.

    Raises:
        RLError: it failed.
    """
    with temporary_folder("rl-replay-") as folder:
        trained = _trained(files, planned, folder, plugins, progress)
    return compared(planned.batches, steps_of(files), trained)


def compared(
    batches: Sequence[KeptBatch], metrics: Mapping[int, Mapping[str, float]], trained: Sequence[Retrained]
) -> Outcome:
    """Compare what was trained again with what the run has kept.

    Args:
        batches: of the run.
        metrics: of its steps; those of a killed run may lack the last.
        trained: the state before the first batch, and what came of each.
    """
    start, *steps = trained
    differ, equal = list[Difference](), True
    for batch, found in zip(batches, steps, strict=True):
        recorded = metrics.get(batch.step, {})
        wanted = {name: recorded.get(name, value) for name, value in batch.metrics.items()}
        weights = weight_differences(batch.step, batch.weights, found.weights)
        differ += [*metric_differences(batch.step, wanted, found.metrics), *weights]
        equal = equal and not weights
    return Outcome(
        step=batches[-1].step,
        after=start.step,
        source="kept batches",
        metrics=len(steps[-1].metrics),
        weights=equal,
        differences=differ,
    )


@full_keys_in_errors()
def _trained(
    files: RunFiles, planned: TrainAgain, folder: Path, plugins: PluginPolicy, progress: Console
) -> list[Retrained]:
    config = without_outputs(planned.config, folder)
    own = RunFiles(folder=folder)
    own.logs.mkdir()
    with launched(config, progress) as (startup, fork_server):
        with interrupts_deferred():
            # imports Ray, which reads the environment at import
            from rl_app_ppo.driver.processes import ProcessPlan
            from rl_app_ppo.driver.retrain import retrain

        screen = Screen(progress)
        for warning in preflight(Facts(config, plugins)):
            screen.note(warning)
        processes = ProcessPlan(
            config=config, files=own, plugins=plugins, fork_server=fork_server, restarts=None, inputs=InputFiles()
        )
        work = retrain(processes, planned.before, files.batches, planned.batches, screen, startup)
        return run_interruptibly(work)
