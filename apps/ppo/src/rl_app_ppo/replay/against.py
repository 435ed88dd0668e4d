"""Compares the kept batches of two runs, and their results."""

from __future__ import annotations

from rl_app_ppo.outputs.run_folder import RunFiles
from rl_app_ppo.replay.differences import (
    COMPUTED,
    Difference,
    field_difference,
    metric_differences,
    weight_differences,
)
from rl_app_ppo.replay.outcome import Outcome
from rl_protocol import ConfigError
from rl_trainer.checkpoints.kept_batches import columns_of, kept_steps, read_batch


def against(run: RunFiles, other: RunFiles, step: int) -> Outcome:
    """Compare the batches of the steps up to this one that both runs keep, and name the first
    difference: in the fields of a step, then in its metrics, then in its weights.

    Raises:
        ConfigError: a run has no batch of the step, or one is damaged.
    """
    for files in (run, other):
        if step not in kept_steps(files.batches):
            raise ConfigError(
                f"{files.batches} has no batch of step {step} to compare; set trainer.keep_batches=-1 in both runs."
            )
    compared = 0
    for one in sorted({*kept_steps(run.batches)} & {*kept_steps(other.batches)}):
        if one > step:
            break
        found, compared = _differences(run, other, one)
        if found:
            weights = not any(line.name.startswith("weights of ") for line in found)
            return Outcome(
                step=step, after=0, source="another run", metrics=compared, weights=weights, differences=found[:1]
            )
    return Outcome(step=step, after=0, source="another run", metrics=compared, weights=True, differences=[])


def _differences(run: RunFiles, other: RunFiles, step: int) -> tuple[list[Difference], int]:
    """Those of a step, and how many metrics were compared."""
    mine, theirs = (read_batch(files.batches, step) for files in (run, other))
    columns = columns_of(run.batches, mine), columns_of(other.batches, theirs)
    field = field_difference(mine, columns[0], theirs, columns[1])
    found = [
        *([field] if field is not None else []),
        *metric_differences(step, mine.metrics, theirs.metrics),
        *weight_differences(step, mine.weights, theirs.weights),
    ]
    return found, sum(name.startswith(COMPUTED) for name in mine.metrics)
