"""Refuse settings that have no effect or that the engines do not support."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rl_app_ppo.config.schema import AppConfig
from rl_protocol import ConfigError
from rl_protocol.support.option_tree import list_options, unmet_need
from rl_rollout_vllm import RANKS
from rl_trainer import LoraConfig, get_training_backend, needs_sum_pi_squared


def unused(config: AppConfig, changed: Iterable[str]) -> dict[str, str]:
    """The keys that have no effect -> what they need."""
    keys = set(changed)
    needs = {option.key: unmet_need(config, option) for option in list_options(AppConfig) if option.key in keys}
    return {key: need for key, need in needs.items() if need}


def refuse_unused(config: AppConfig, changed: Mapping[str, object]) -> None:
    """Check that all changed settings have an effect.

    Raises:
        ConfigError: one has none; names what it needs.
    """
    for key, need in unused(config, changed).items():
        raise ConfigError(f"{key}={changed[key]} has no effect: nothing reads it without {need}.")


def check_engine(config: AppConfig) -> None:
    """Check that the engines support the rest of the configuration.

    Raises:
        ConfigError: one does not; names the key to change.
    """
    if config.rollout.name == "vllm" and config.sends_adapters:
        _check_vllm(config.lora)
    engine = get_training_backend(config.model_engine)
    if needs_sum_pi_squared(config.algorithm) and not engine.sum_pi_squared:
        estimator = f"algorithm.adv_estimator={config.algorithm.adv_estimator}"
        raise ConfigError(
            f"model_engine={engine.name} does not compute what {estimator} needs of each token. Set another estimator, or model_engine=fsdp."
        )


def _check_vllm(lora: LoraConfig) -> None:
    if lora.use_dora:
        raise ConfigError("rollout.name=vllm serves no DoRA adapters; got lora.use_dora=true. Set lora.merge=true.")
    if lora.rank > max(RANKS):
        raise ConfigError(
            f"rollout.name=vllm serves adapters up to rank {max(RANKS)}; got lora.rank={lora.rank}. Set lora.merge=true."
        )
