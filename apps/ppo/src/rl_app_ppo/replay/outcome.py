"""What a replay has found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from rl_app_ppo.outputs.metrics_file import read_metrics
from rl_app_ppo.outputs.run_folder import RunFiles
from rl_app_ppo.replay.differences import Difference
from rl_trainer.checkpoints.checkpoint_folder import step_name

_SHOWN = 10
"""Most differences that are printed."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What was compared, and what differs."""

    step: int
    after: int
    """Step of the checkpoint that it started from; 0: the beginning."""
    source: Literal["kept batches", "generated again", "another run"]
    metrics: int
    """Metrics of the step that were compared."""
    weights: bool | None
    """Whether parameters and optimizer states are equal; None: the run has none of this step."""
    differences: list[Difference]
    """In the order of the steps."""

    @property
    def equal(self) -> bool:
        """Whether all that was compared is equal."""
        return not self.differences and self.weights is not False

    def text(self) -> str:
        """For the user."""
        start = f"checkpoint {step_name(self.after)}" if self.after else "the beginning"
        lines = {
            "kept batches": f"step {self.step} was trained again on its kept batch, from {start}",
            "generated again": f"step {self.step} was computed again from {start}",
            "another run": f"steps up to {self.step} were compared with those of the other run",
        }
        found = [lines[self.source]]
        found += [str(one) for one in self.differences[:_SHOWN]]
        if len(self.differences) > _SHOWN:
            found.append(f"and {len(self.differences) - _SHOWN} more differences")
        if not self.differences:
            found.append(f"metrics: {self.metrics} equal")
        if self.weights is None:
            found.append(f"parameters: not compared, for the run has no checkpoint of step {self.step}")
        else:
            found.append(f"parameters and optimizer: {'equal' if self.weights else 'different'}")
        return "\n".join(found)


def steps_of(files: RunFiles) -> dict[int, Mapping[str, float]]:
    """The metrics of each step."""
    return {int(line["step"]): line for line in read_metrics(files.metrics)}
