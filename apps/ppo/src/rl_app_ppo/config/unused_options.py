"""Refuse settings that have no effect or that the engines do not support."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rl_app_ppo.config.schema import AppConfig
from rl_protocol import ConfigError
from rl_protocol.support.option_tree import list_options, unmet_need
from rl_trainer import needs_sum_pi_squared


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
    if config.sends_adapters:
        if not config.generator.adapters:
            raise ConfigError(
                f"rollout.name={config.rollout.name} takes no adapters; got lora.rank={config.lora.rank}. Set lora.merge=true."
            )
        config.generator.check_adapters(config.lora)
    if config.rollout.records_kept_sets and not config.generator.kept_sets:
        raise ConfigError(
            f"rollout.name={config.rollout.name} does not report the tokens that rollout.top_p={config.rollout.top_p} and "
            f"rollout.top_k={config.rollout.top_k} keep. Set rollout.sampling_replay=false for log-probs over all tokens, or sample from all."
        )
    replay = config.algorithm.router_replay
    if replay == "R3" and not config.generator.routed_experts:
        raise ConfigError(
            f"rollout.name={config.rollout.name} does not report the experts of each token, which algorithm.router_replay=R3 replays. Set it to R2, "
            "which replays those of the actor's pass before the update, or rollout.name=hf."
        )
    if config.actor.use_kl_loss and config.actor.kl_loss_topk and not config.backend.finds_top_tokens:
        raise ConfigError(
            f"model_engine={config.model_engine} does not find the most probable tokens, for which actor.kl_loss_topk={config.actor.kl_loss_topk} "
            "is. Set it to 0, algorithm=opd_pg to distil a teacher, or model_engine=fsdp."
        )
    if needs_sum_pi_squared(config.algorithm) and not config.backend.sum_pi_squared:
        names = ", ".join(dict.fromkeys(one.adv_estimator for one in config.algorithm.variants))
        raise ConfigError(
            f"model_engine={config.model_engine} does not compute what algorithm.adv_estimator={names} needs of each token. "
            "Set another estimator, or model_engine=fsdp."
        )
