"""Check the functions of `reward.function` without importing them."""

from __future__ import annotations

from rl_app_ppo.config.schema import RewardConfig
from rl_protocol import ConfigError
from rl_trainer.rewards import check_reward, parse_terms
from rl_trainer.rewards.by_data_source import REWARDS
from rl_trainer.rewards.scorer_toml import is_scorer_toml, read_scorer_toml


def check_rewards(config: RewardConfig) -> None:
    """Check that every function exists and may be loaded, and that every description can be read.

    Raises:
        ConfigError: one can't be used; names it.
    """
    for term in parse_terms(config.function):
        if is_scorer_toml(term.name):
            read_scorer_toml(term.name)
        else:
            check_reward(term.name)


def check_source(config: RewardConfig, data_source: str) -> None:
    """Check that by_data_source, if it is used, has a reward for rows of `data_source`.

    Raises:
        ConfigError: it has none.
    """
    used = any(term.name == "by_data_source" for term in parse_terms(config.function))
    if used and data_source not in REWARDS:
        raise ConfigError(
            f"reward.function=by_data_source has no reward for data_source={data_source!r}; it has rewards for {', '.join(REWARDS)}. Set "
            "reward.function to the reward of these rows."
        )
