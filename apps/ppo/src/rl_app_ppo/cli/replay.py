"""`rl replay`: computes a step of a run again, and compares it bit by bit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from rl_app_ppo.api.launch import launch
from rl_app_ppo.cli.columns import columns
from rl_app_ppo.config.loading import from_yaml
from rl_app_ppo.config.schema import AppConfig
from rl_app_ppo.outputs.metrics_file import read_metrics
from rl_app_ppo.outputs.run_folder import RunFiles
from rl_ckpt_engine import PluginPolicy
from rl_protocol import ConfigError
from rl_protocol.support.temporary_folders import temporary_folder
from rl_trainer.checkpoints.checkpoint_folder import Checkpoint, inspect, newest_whole, step_name
from rl_trainer.record.read_record import read_record
from rl_trainer.record.record_rows import TrajectoryRow

COMPUTED = ("actor/", "critic/", "response_length/", "prompt_length/", "rollout_corr/", "training/")
"""How the names of metrics begin that do not depend on time."""
_SHOWN = 10
"""Most differences that are printed."""


def replay(run: Path, step: int, row: str, field: str, plugins: PluginPolicy, out: Console, progress: Console) -> bool:
    """Train from the checkpoint before a step up to it, in a temporary folder, and print what
    differs from the run.

    Args:
        run: folder of the run.
        step: the step.
        row: key of a trajectory of the step to print, `uid/session/index`; empty: none.
        field: the one column of it to print; empty: all.
        plugins: which plug-ins the operator allows.
        out: where to print the result.
        progress: where the replayed run prints.

    Returns:
        Whether all that was compared is equal.

    Raises:
        ConfigError: the folder has no such step, or the step no such trajectory or column.
        RLError: the replayed run failed.
    """
    files = RunFiles(folder=run)
    config, wanted = _config_of(files), _steps(files)
    if step not in wanted or step < 1:
        raise ConfigError(f"--step must be a trained step in {files.metrics}, one of {_range(wanted)}; got {step}.")
    before, _ = newest_whole(files.checkpoints, before=step)
    with temporary_folder("rl-replay-") as folder:
        again = RunFiles(folder=launch(replayed(config, before, step, folder), plugins, progress).run_folder)
        after = before.manifest.step if before is not None else 0
        compared = _compare(files, again, after, step)
        shown = _row_text(again, step, row, field) if row else ""
    lines = compared.lines()
    if not compared.equal and not config.trainer.deterministic:
        lines.append("the run has trainer.deterministic=false, so its sums depend on timing")
    out.print(Text("\n".join([*lines, *filter(None, [shown])])), soft_wrap=True)
    return compared.equal


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """What a replay has found."""

    step: int
    after: int
    """Step of the checkpoint that it started from; 0: the beginning."""
    metrics: int
    """Metrics of the step that were compared."""
    differ: Sequence[tuple[str, str, str, str]]
    """(step, name, value in the run, value in the replay) of those that are not equal."""
    weights: bool | None
    """Whether parameters and optimizer states are equal; None: the run has none of this step."""

    @property
    def equal(self) -> bool:
        return not self.differ and self.weights is not False

    def lines(self) -> list[str]:
        """As text for the user."""
        start = f"checkpoint {step_name(self.after)}" if self.after else "the beginning"
        lines = [f"step {self.step} was computed again from {start}"]
        if not self.differ:
            lines.append(f"metrics: {self.metrics} equal")
        else:
            lines.append(columns([("step", "metric", "run", "replay"), *self.differ[:_SHOWN]]).rstrip())
        if len(self.differ) > _SHOWN:
            lines.append(f"and {len(self.differ) - _SHOWN} more")
        if self.weights is None:
            lines.append(f"parameters: not compared, for the run has no checkpoint of step {self.step}")
        else:
            lines.append(f"parameters and optimizer: {'equal' if self.weights else 'different'}")
        return lines


def _compare(run: RunFiles, again: RunFiles, after: int, step: int) -> Compared:
    wanted, found = _steps(run), _steps(again)
    differ = [
        (str(one), *line) for one in range(after + 1, step + 1) for line in differences(wanted.get(one, {}), found[one])
    ]
    metrics = sum(map(_is_computed, found[step]))
    return Compared(step=step, after=after, metrics=metrics, differ=differ, weights=_weights(run, again, step))


def replayed(config: AppConfig, before: Checkpoint | None, step: int, folder: Path) -> AppConfig:
    """The configuration that computes the steps after a checkpoint up to this one, with a record of
    all trajectories.
    """
    trainer = replace(
        config.trainer,
        output_dir=str(folder),
        run_name="replay",
        resume_mode=str(before.folder.resolve()) if before is not None else "disable",
        total_training_steps=step,
        total_epochs=0,
        val_before_train=False,
        test_freq=0,
        save_freq=0,
        sample_freq=1,
        samples_per_step=2**30,
        logger=("console",),
    )
    return replace(config, trainer=trainer, transfer_queue=replace(config.transfer_queue, durability="off"))


def differences(run: Mapping[str, float], replay: Mapping[str, float]) -> list[tuple[str, str, str]]:
    """(name, value, other value) of the computed metrics that are not equal.

    >>> differences({"actor/loss": 0.5, "timing_s/step": 1.0}, {"actor/loss": 0.25})
    [('actor/loss', '0.5', '0.25')]
    """
    names = sorted({name for name in (*run, *replay) if _is_computed(name)})
    pairs = ((name, repr(run.get(name)), repr(replay.get(name))) for name in names)
    return [(name, one, other) for name, one, other in pairs if one != other]


def _is_computed(name: str) -> bool:
    return name.startswith(COMPUTED)


def _config_of(files: RunFiles) -> AppConfig:
    try:
        return from_yaml(files.config.read_text())
    except OSError as error:
        raise ConfigError(
            f"{files.folder} is no run: {files.config} can't be read, {error.strerror}. Give the folder that the end of a run printed."
        ) from error


def _steps(files: RunFiles) -> dict[int, Mapping[str, float]]:
    return {int(line["step"]): line for line in read_metrics(files.metrics)}


def _range(steps: Iterable[int]) -> str:
    trained = [step for step in steps if step]
    return f"{min(trained)}..{max(trained)}" if trained else "none"


def _weights(run: RunFiles, replay: RunFiles, step: int) -> bool | None:
    """Whether parameters and optimizer states after the step are equal; None: the run has none."""
    one, other = (inspect(files.checkpoints / step_name(step)) for files in (run, replay))
    if not isinstance(one, Checkpoint) or not isinstance(other, Checkpoint):
        return None
    tensors = [
        {name: facts for name, facts in found.manifest.files.items() if name.endswith(".safetensors")}
        for found in (one, other)
    ]
    return tensors[0] == tensors[1]


def _row_text(files: RunFiles, step: int, key: str, field: str) -> str:
    rows = {row.key: row for row in read_record(files.record).trajectories if row.step == step}
    if key not in rows:
        raise ConfigError(
            f"--row must be a trajectory of step {step}, such as {next(iter(rows), 'none')}; got {key!r}."
        )
    values = msgspec.to_builtins(rows[key])
    if not field:
        return columns([(name, str(value)) for name, value in values.items()])
    if field not in values:
        names = ", ".join(one.name for one in msgspec.structs.fields(TrajectoryRow))
        raise ConfigError(f"--field must be a column of the trajectory, of {names}; got {field!r}.")
    return str(values[field])
