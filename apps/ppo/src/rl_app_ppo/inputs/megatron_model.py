"""Models for Megatron-Core: how they are divided over ranks, and which are supported.

Imports rl-megatron-peft, of the extra `megatron`, but not Megatron-Core.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from rl_app_ppo.config.schema import AppConfig
from rl_protocol import ConfigError
from rl_trainer.config.backends import MegatronConfig


def check_megatron_model(config: AppConfig, path: Path) -> None:
    """Check that Megatron-Core can train the model in a folder, divided as configured.

    Without rl-megatron-peft nothing is checked: that it is missing is found by another check.

    Raises:
        ConfigError: it can't; names the field of config.json, or the key.
    """
    if not isinstance(config.engine, MegatronConfig) or find_spec("rl_megatron_peft") is None:
        return
    from rl_megatron_peft import Layout, ModelShape  # optional

    options = config.engine
    try:
        shape = ModelShape.read(path)
        layout = Layout(
            tensor=options.tensor_model_parallel_size,
            pipeline=options.pipeline_model_parallel_size,
            sequence_parallel=options.sequence_parallel,
            expert=options.expert_model_parallel_size,
        )
        layout.check(shape)
        if not config.lora.rank:
            layout.check_whole(shape)
    except ConfigError as error:
        key = _KEYS.get(str(getattr(error, "field", "")))
        hint = f" The key is {key}." if key else ""
        raise ConfigError(f"model_engine=megatron can't train model.path={str(path)!r}: {error}{hint}") from error


_KEYS = {
    "tensor": "megatron.tensor_model_parallel_size",
    "pipeline": "megatron.pipeline_model_parallel_size",
    "expert": "megatron.expert_model_parallel_size",
    "sequence_parallel": "megatron.sequence_parallel",
}
"""Argument of Layout -> its key."""
