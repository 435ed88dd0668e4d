"""Where a run starts: from the beginning, or from a checkpoint; and whether that checkpoint is of the same run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rl_app_ppo.config import flat_settings, to_yaml
from rl_app_ppo.schema import AppConfig
from rl_protocol import ConfigError, OutputError
from rl_trainer.checkpoints.folder import Checkpoint, inspect, newest_whole

CHECKPOINTS = "checkpoints"
"""Folder of a run that holds them."""
MODEL = "checkpoint"
"""Folder of a run with the model that it ended with, as transformers or peft writes it."""

FREE = (
    "algorithm.name",
    "preset",
    "trainer.total_training_steps",
    "trainer.total_epochs",
    "trainer.test_freq",
    "trainer.val_before_train",
    "trainer.save_freq",
    "trainer.logger",
    "trainer.hooks",
    "trainer.max_ckpt_to_keep",
    "trainer.resume_mode",
    "trainer.output_dir",
    "trainer.run_name",
    "trainer.min_free_disk_mb",
    "trainer.stage_timeout_s",
    "trainer.threads_per_worker",
    "model_engine",
    "model.cache_dir",
    "fsdp.",
    "megatron.",
    "lora.merge",
    "ray.",
    "transfer_queue.",
    "checkpoint_engine.",
    "rollout.num_workers",
    "rollout.tensor_model_parallel_size",
    "rollout.max_batch_size",
    "rollout.val_kwargs.",
    "data.val_size",
    "actor.optim.",
    "critic.optim.",
    *(
        f"{role}.{how}"
        for role in ("actor", "critic")
        for how in ("ppo_micro_batch_size", "ppo_max_token_len", "use_remove_padding")
    ),
)
"""Keys (exact, or groups that end in a dot) that a resumed run may change: its length and outputs, where and how it is computed, the settings
of its optimizers, and the names of layers, whose values are compared one by one. All others say what is learnt."""


SAME_STATE = {"torch", "fsdp"}
"""Engines that read what the others of them have saved."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run starts."""

    checkpoint: Checkpoint | None = None
    """None: at the beginning."""
    finished: bool = False
    """The run has done all its steps and written its model: there is nothing to do."""
    set_aside: bool = False
    """The run folder may hold what an attempt has left that ended before its first checkpoint."""
    notes: Sequence[str] = field(default_factory=tuple[str, ...])
    """What the user is to know: what was passed over, what has changed."""


def find_start(config: AppConfig, folder: Path) -> Start:
    """Look for the checkpoint that trainer.resume_mode asks for; `folder` is the run's.

    Raises:
        ConfigError: it names no whole checkpoint, or one of a run that differs in a key that may not change; names the key.
        OutputError: the run folder holds a finished run, or damaged checkpoints, and none to go on from: starting over would overwrite it.
    """
    mode, notes = config.trainer.resume_mode, list[str]()
    if mode == "disable":
        return Start()
    if mode == "auto":
        checkpoint, skipped = newest_whole(folder / CHECKPOINTS)
        notes += [f"checkpoint {name} is passed over: {why}" for name, why in skipped.items()]
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
        return Start(
            checkpoint=checkpoint,
            finished=True,
            notes=[
                f"{folder} has done its {done} steps already; there is nothing to do. Raise trainer.total_training_steps to train further."
            ],
        )
    notes.append(f"resumes after step {checkpoint.manifest.step} ({checkpoint.folder})")
    notes += [f"changed since then: {change}" for change in changes(checkpoint, config)]
    return Start(checkpoint=checkpoint, notes=notes)


def _refuse_to_start_over(folder: Path, skipped: Sequence[str]) -> None:
    if (folder / MODEL).exists() or skipped:
        why = "; ".join(skipped) or f"it has a finished model in {MODEL}/, and no checkpoints"
        raise OutputError(
            f"trainer.resume_mode=auto finds no whole checkpoint in {folder}: {why}. Starting over would overwrite what is there. Set "
            "trainer.run_name to another name for a new run."
        )


def changes(checkpoint: Checkpoint, config: AppConfig) -> list[str]:
    """What differs from the configuration of the checkpoint, one `key: before -> now` each; keys that only one of them has are left out.

    Raises:
        ConfigError: a key that may not change differs.
    """
    before, now = flat_settings(checkpoint.config), flat_settings(to_yaml(config))
    differ = {key: value for key, value in now.items() if before.get(key, value) != value}
    for key, value in differ.items():
        if (
            not _free(key)
            or _moves_rows(key, before, now)
            or (key == "model_engine" and not {value, before[key]} <= SAME_STATE)
        ):
            raise ConfigError(
                f"{key}={value!r} is not what the checkpoint {checkpoint.folder} was trained with, {before[key]!r}. It can't change "
                "in the middle of a run: set it back, or set trainer.resume_mode=disable and another trainer.run_name for a new run."
            )
    _check_length(checkpoint, config)
    quiet = ("algorithm.name", "preset", "trainer.resume_mode", "trainer.output_dir", "trainer.run_name")
    return [f"{key}: {before[key]!r} -> {value!r}" for key, value in differ.items() if key not in quiet]


def _moves_rows(key: str, before: Mapping[str, object], now: Mapping[str, object]) -> bool:
    """Whether a change of that key makes other rows of the training files validation rows: see AppConfig.holds_out."""
    held = bool(now["data.train_files"]) and not now["data.val_files"] and bool(now["data.val_split"])
    return key == "trainer.test_freq" and held and not (before[key] and now[key])


def _check_length(checkpoint: Checkpoint, config: AppConfig) -> None:
    done, total = checkpoint.manifest.step, config.trainer.total_training_steps
    if done > total:
        raise ConfigError(
            f"trainer.total_training_steps must be at least {done}, the steps the checkpoint {checkpoint.folder} has done; got {total}."
        )


def _free(key: str) -> bool:
    return any(key == free or (free.endswith(".") and key.startswith(free)) for free in FREE)
