"""The reward of a run: what `reward.*` says, checked before processes start and opened where responses are scored."""

from __future__ import annotations

from rl_app_ppo.schema import RewardConfig
from rl_trainer.rewards import CombinedScorer, InlineScorer, Scorer, ScorerPool, check_reward, load_reward, parse_terms
from rl_trainer.rewards.loading import HARMLESS


def check_rewards(config: RewardConfig) -> None:
    """Check that every function there is may be loaded; imports none.

    Raises:
        ConfigError: names the function.
    """
    for term in parse_terms(config.function):
        check_reward(term.name)


async def open_scorer(config: RewardConfig) -> Scorer:
    """The functions of `reward.function`, each in processes of its own unless it is known to be harmless.

    Raises:
        ConfigError: one can't be loaded.
    """
    terms = parse_terms(config.function)
    return CombinedScorer(terms, [await _open(term.name, config) for term in terms])


async def _open(name: str, config: RewardConfig) -> Scorer:
    if name in HARMLESS:
        return InlineScorer(load_reward(name))
    return await ScorerPool.open(
        name, workers=config.num_workers, timeout_s=config.timeout_s, memory_mb=config.memory_mb
    )
