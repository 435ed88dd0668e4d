"""The final model of a run that was made longer after its end."""

from __future__ import annotations

from pathlib import Path

from rl_app_ppo.outputs.run_folder import withdraw_folder
from rl_trainer import Hook


class EarlierModel(Hook):
    """Hook that hides the model of an earlier end of the run when its last checkpoint begins.

    A run with that checkpoint and a model has finished. One that is killed between the two must not
    have the model of fewer steps.

    Args:
        model: folder of the final model.
        steps: of the run.
    """

    def __init__(self, model: Path, steps: int) -> None:
        self._model = model
        self._steps = steps

    def on_checkpoint_begin(self, step: int) -> None:
        if step == self._steps:
            withdraw_folder(self._model)
