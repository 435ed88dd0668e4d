"""`trainer.resume_mode`: find the checkpoint, and check that it fits the configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rl_app_ppo.config.loading import flat_settings, to_yaml
from rl_app_ppo.config.schema import AppConfig
from rl_app_ppo.config.training_backends import get_training_backend
from rl_app_ppo.inputs.input_files import InputFiles, differing
from rl_app_ppo.outputs.run_folder import CHECKPOINTS, MODEL
from rl_protocol import ConfigError, OutputError
from rl_protocol.counted import counted
from rl_protocol.support.option_tree import list_options
from rl_protocol.support.options import items
from rl_trainer.checkpoints.checkpoint_folder import Checkpoint, inspect, newest_whole


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run starts."""

    checkpoint: Checkpoint | None = None
    """None: the beginning."""
    finished: bool = False
    """All steps are done and the model is written: there is nothing to do."""
    set_aside: bool = False
    """The run folder may have files of an attempt that ended before its first checkpoint."""
    notes: Sequence[str] = field(default_factory=tuple[str, ...])
    """Notes for the user: skipped checkpoints, changed settings."""


def find_start(config: AppConfig, folder: Path, inputs: InputFiles) -> Start:
    """Find the checkpoint of trainer.resume_mode.

    Args:
        config: the configuration of the run.
        folder: the folder of the run.
        inputs: the files that it reads.

    Raises:
        ConfigError: it is no whole checkpoint, or differs in a key that must not change, or in the
            content of a data file; names the key.
        OutputError: the run folder has a finished run or damaged checkpoints, but no checkpoint to
            resume from. Starting over would overwrite it.
    """
    mode, notes = config.trainer.resume_mode, list[str]()
    if mode == "disable":
        return Start()
    if mode == "auto":
        checkpoint, skipped = newest_whole(folder / CHECKPOINTS)
        notes += [f"checkpoint {name} is skipped: {why}" for name, why in skipped.items()]
    else:
        found = inspect(Path(mode).expanduser().resolve())
        if isinstance(found, str):
            raise ConfigError(
                f"trainer.resume_mode={mode!r} is no whole checkpoint: {found}. "
                f"Give a folder such as outputs/<run>/{CHECKPOINTS}/step-000010, or auto."
            )
        checkpoint = found
    if checkpoint is None:
        _refuse_to_start_over(folder, notes)
        return Start(notes=notes, set_aside=True)
    done = checkpoint.manifest.step
    if mode == "auto" and done == config.trainer.total_training_steps and (folder / MODEL).exists():
        changes(checkpoint, config)
        _changed_files(checkpoint, config, inputs)
        return Start(
            checkpoint=checkpoint,
            finished=True,
            notes=[
                f"{folder} has done its {counted(done, 'step')} already; there is nothing to do. Raise trainer.total_training_steps to train further."
            ],
        )
    notes.append(f"resumes after step {checkpoint.manifest.step} ({checkpoint.folder})")
    notes += [f"changed since then: {change}" for change in changes(checkpoint, config)]
    notes += _changed_files(checkpoint, config, inputs)
    return Start(checkpoint=checkpoint, notes=notes)


def _refuse_to_start_over(folder: Path, skipped: Sequence[str]) -> None:
    if (folder / MODEL).exists() or skipped:
        why = "; ".join(skipped) or f"it has a finished model in {MODEL}/, and no checkpoints"
        raise OutputError(
            f"trainer.resume_mode=auto finds no whole checkpoint in {folder}: {why}. Starting over would overwrite what is there. Set "
            "trainer.run_name to another name for a new run."
        )


def changes(checkpoint: Checkpoint, config: AppConfig) -> list[str]:
    """Differences from the configuration of the checkpoint, as `key: before -> now`.

    Keys that only one of the two has are left out.

    Raises:
        ConfigError: a key that must not change differs.
    """
    before, now = flat_settings(checkpoint.config), flat_settings(to_yaml(config))
    rules = {option.key: option.resume for option in list_options(AppConfig)}
    before |= {
        option.key: items(before[option.key])
        for option in list_options(AppConfig)
        if option.is_list and option.key in before
    }
    differ = {key: value for key, value in now.items() if before.get(key, value) != value}
    for key, value in differ.items():
        if (
            rules[key] == "fixed"
            or _moves_rows(key, before, now)
            or (key == "model_engine" and not _reads_state(str(value), str(before[key])))
        ):
            raise ConfigError(
                f"{key}={value!r} is not what the checkpoint {checkpoint.folder} was trained with, {before[key]!r}. It can't change "
                "in the middle of a run: set it back, or set trainer.resume_mode=disable and another trainer.run_name for a new run."
            )
    _check_length(checkpoint, config)
    return [f"{key}: {before[key]!r} -> {value!r}" for key, value in differ.items() if rules[key] != "silent"]


def _changed_files(checkpoint: Checkpoint, config: AppConfig, inputs: InputFiles) -> list[str]:
    """Notes about files whose content has changed since the checkpoint.

    Files that the checkpoint has no digest of are left out, as in one of an older version.

    Raises:
        ConfigError: a data file has changed, and data.on_changed_file does not accept that.
    """
    notes, before = list[str](), checkpoint.manifest.inputs
    for key, name in differing(before, inputs.data):
        if config.data.on_changed_file != "accept":
            raise ConfigError(
                f"{key}: {name} is not the file that the checkpoint {checkpoint.folder} was trained with: its content has changed. Put "
                "that file back, set data.on_changed_file=accept to continue with the changed one, or set trainer.resume_mode=disable and "
                "another trainer.run_name for a new run."
            )
        if checkpoint.run_state.prompt_order:
            raise ConfigError(
                f"{key}: {name} has changed since the checkpoint {checkpoint.folder}, which has the scores of its rows "
                f"(data.curriculum={config.data.curriculum}), so data.on_changed_file=accept can't be used. Put that file back, or set "
                "trainer.resume_mode=disable and another trainer.run_name for a new run."
            )
        notes.append(f"warning: {name} ({key}) has changed since then; it is accepted (data.on_changed_file)")
    notes += [
        f"warning: the code {name} ({key}) has changed since then" for key, name in differing(before, inputs.code)
    ]
    return notes


def _moves_rows(key: str, before: Mapping[str, object], now: Mapping[str, object]) -> bool:
    """Whether changing the key moves rows from training to validation: AppConfig.holds_out."""
    held = bool(now["data.train_files"]) and not now["data.val_files"] and bool(now["data.val_split"])
    return key == "trainer.test_freq" and held and not (before[key] and now[key])


def _check_length(checkpoint: Checkpoint, config: AppConfig) -> None:
    done, total = checkpoint.manifest.step, config.trainer.total_training_steps
    if done > total:
        raise ConfigError(
            f"trainer.total_training_steps must be at least {done}, the steps the checkpoint {checkpoint.folder} has done; got {total}."
        )


def _reads_state(engine: str, before: str) -> bool:
    """Whether an engine continues from the checkpoints of another."""
    return get_training_backend(engine).reads_state_of(get_training_backend(before))
