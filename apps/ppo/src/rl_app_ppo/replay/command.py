"""The command `rl replay`: runs the replay that its options ask for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from rl_app_ppo.config.loading import read_config
from rl_app_ppo.config.model_path import given_model
from rl_app_ppo.config.schema import AppConfig
from rl_app_ppo.inputs.demo_model import cached_demo_model
from rl_app_ppo.inputs.tokenizer import load_tokenizer, raw_decoder
from rl_app_ppo.outputs.run_folder import RunFiles, files_of
from rl_app_ppo.replay.against import against
from rl_app_ppo.replay.generate_again import generate_again
from rl_app_ppo.replay.outcome import Outcome, steps_of
from rl_app_ppo.replay.rows import Decode, row_values, rows_text
from rl_app_ppo.replay.train_again import TrainAgain, checkpoint_before, kept_config, plan, train_again
from rl_ckpt_engine import PluginPolicy
from rl_protocol import ConfigError
from rl_trainer.checkpoints.kept_batches import columns_of, kept_steps, read_batch


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """The options of the command."""

    run: Path
    step: int
    row: str = ""
    """Key or number of a row to print; empty: all, if there is a field."""
    field: str = ""
    """The one field to print; empty: all, if there is a row."""
    against: Path | None = None
    """Another run to compare the batches with."""
    json: bool = False


def replay(options: ReplayOptions, plugins: PluginPolicy, out: Console, progress: Console) -> bool:
    """Print rows of a step's batch; or compare its batch and those before with those of another
    run; or compute it again and print what differs.

    Args:
        options: what to do.
        plugins: which plug-ins the operator allows.
        out: where to print the result.
        progress: where the processes print that compute it again.

    Returns:
        Whether all that was compared is equal.

    Raises:
        ConfigError: the folder has no such step, or it can't be replayed.
        RLError: it failed.
    """
    files = RunFiles(folder=options.run)
    config = _config_of(files)
    _require_step(files, options.step)
    if options.row or options.field:
        _print_rows(files, options, out)
        return True
    if options.against is not None:
        other = RunFiles(folder=options.against)
        _config_of(other)
        outcome = against(files, other, options.step)
    else:
        outcome = _again(files, config, options.step, plugins, progress)
    text = msgspec.json.encode(outcome).decode() if options.json else outcome.text()
    out.print(Text(text), soft_wrap=True)
    return outcome.equal


def _again(files: RunFiles, config: AppConfig, step: int, plugins: PluginPolicy, progress: Console) -> Outcome:
    planned = plan(files, step)
    if isinstance(planned, TrainAgain):
        return train_again(files, planned, plugins, progress)
    if not config.trainer.deterministic:
        raise ConfigError(
            f"{files.batches} lacks the batches of the steps {', '.join(map(str, planned))}, which step {step} depends on since the checkpoint "
            "before it, and with trainer.deterministic=false they can't be generated again bit by bit. Set trainer.keep_batches=-1, or at "
            "least to trainer.save_freq, in a run to be replayed."
        )
    return generate_again(files, config, checkpoint_before(files, step), step, plugins, progress)


def _print_rows(files: RunFiles, options: ReplayOptions, out: Console) -> None:
    if options.step not in kept_steps(files.batches):
        raise ConfigError(
            f"{files.batches} has no batch of step {options.step} for --row and --field to look into; set trainer.keep_batches=-1 in a run to be "
            "replayed."
        )
    batch = read_batch(files.batches, options.step)
    decode = _decoder(kept_config(files, options.step))
    found = row_values(batch, columns_of(files.batches, batch), options.row, options.field, decode)
    text = msgspec.json.encode(found).decode() if options.json else rows_text(found, options.field).rstrip("\n")
    out.print(Text(text), soft_wrap=True)


def _decoder(config: AppConfig) -> Decode:
    path = given_model(config) or cached_demo_model(config)
    if path is None:
        return lambda _: f"(the demo's model is not in {config.model.cache_dir})"
    return raw_decoder(load_tokenizer(path))


def _config_of(files: RunFiles) -> AppConfig:
    return read_config(files_of(files.folder).config)


def _require_step(files: RunFiles, step: int) -> None:
    """A killed run may have kept the batch of a step whose metrics it has not written."""
    steps = sorted({*steps_of(files), *kept_steps(files.batches)} - {0})
    if step not in steps:
        known = f"one of {steps[0]}..{steps[-1]}" if steps else "which has none yet"
        raise ConfigError(f"--step must be a trained step in {files.metrics}, {known}; got {step}.")
