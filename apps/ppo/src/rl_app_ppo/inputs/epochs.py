"""Convert trainer.total_epochs to steps, once the data is known."""

from __future__ import annotations

from dataclasses import replace

from rl_app_ppo.config.model_path import given_model
from rl_app_ppo.config.schema import AppConfig
from rl_app_ppo.inputs.data import open_data
from rl_protocol import ConfigError


def with_length(config: AppConfig) -> AppConfig:
    """Convert trainer.total_epochs to trainer.total_training_steps; no change without epochs.

    An epoch has one step per whole batch of the training data. If both limits are set, the smaller
    one applies.

    Raises:
        ConfigError: the training data has no whole batch.
    """
    trainer, batch = config.trainer, config.data.train_batch_size
    if not trainer.total_epochs:
        return config
    rows = len(open_data(config, given_model(config))["train"])
    if rows < batch:
        raise ConfigError(
            f"data.train_batch_size must be at most {rows}, the rows of the training data, with trainer.total_epochs="
            f"{trainer.total_epochs}; got {batch}."
        )
    steps = trainer.total_epochs * (rows // batch)
    if trainer.total_training_steps >= 0:
        steps = min(steps, trainer.total_training_steps)
    return replace(config, trainer=replace(trainer, total_training_steps=steps))
