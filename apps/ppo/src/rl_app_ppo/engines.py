"""What a training engine can't do, said before a process starts."""

from __future__ import annotations

from rl_app_ppo.schema import AppConfig
from rl_protocol import ConfigError
from rl_rollout_vllm import RANKS
from rl_trainer import LoraConfig, get_engine, needs_sum_pi_squared


def check_engine(config: AppConfig) -> None:
    """That the engines train and generate with what the rest of the configuration asks for.

    Raises:
        ConfigError: names the key to change.
    """
    if config.rollout.name == "vllm" and config.sends_adapters:
        _check_vllm(config.lora)
    engine = get_engine(config.model_engine)
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
