"""The result of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rl_app_ppo.outputs.metrics_file import read_metrics
from rl_app_ppo.outputs.run_folder import RunFiles
from rl_trainer.checkpoints.checkpoint_folder import step_name


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The metrics and the files of a finished run.

    Its repr, which a notebook prints, has the files alone.
    """

    metrics: Mapping[str, float] = field(repr=False)
    """Metrics of the last step, with those of the validation after it; empty without a step."""
    history: Sequence[Mapping[str, float]] = field(repr=False)
    """Metrics of every step in order, with the key `step`: the lines of `metrics.jsonl`. Step 0 is
    the validation before training. A resumed run has the steps before its checkpoint too.
    """
    run_folder: Path
    """Everything that the run wrote: configuration, metrics, samples and logs."""
    checkpoint: Path | None
    """The checkpoint of the last step, which `trainer.resume_mode` takes; None without a step."""
    model: Path
    """The trained model, as transformers or peft loads it."""

    @classmethod
    def of(cls, files: RunFiles, steps: int) -> TrainResult:
        """Read the result of a run of that many steps from its folder."""
        history = read_metrics(files.metrics)
        checkpoint = files.checkpoints / step_name(steps)
        return cls(
            metrics=history[-1] if history else {},
            history=history,
            run_folder=files.folder,
            checkpoint=checkpoint if checkpoint.is_dir() else None,
            model=files.checkpoint,
        )
