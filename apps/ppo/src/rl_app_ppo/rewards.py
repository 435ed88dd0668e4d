"""The reward of a run: what `reward.*` says, checked before processes start and opened where responses are scored."""

from __future__ import annotations

from pathlib import Path

from rl_app_ppo.schema import RewardConfig
from rl_app_ppo.wiring.data import load_tokenizer
from rl_protocol import ConfigError
from rl_trainer.rewards import CombinedScorer, InlineScorer, Scorer, ScorerPool, check_reward, load_reward, parse_terms
from rl_trainer.rewards.by_data_source import REWARDS
from rl_trainer.rewards.described import Model, Remote, is_described, read_description
from rl_trainer.rewards.loading import HARMLESS


def check_rewards(config: RewardConfig) -> None:
    """Check that every function there is may be loaded, and that descriptions can be read; imports none.

    Raises:
        ConfigError: names the function.
    """
    for term in parse_terms(config.function):
        if is_described(term.name):
            read_description(term.name)
        else:
            check_reward(term.name)


def check_source(config: RewardConfig, data_source: str) -> None:
    """Check that by_data_source, where it is used, knows a reward for rows of `data_source`.

    Raises:
        ConfigError: it knows none.
    """
    used = any(term.name == "by_data_source" for term in parse_terms(config.function))
    if used and data_source not in REWARDS:
        raise ConfigError(
            f"reward.function=by_data_source knows no reward for data_source={data_source!r}; it knows {', '.join(REWARDS)}. Set "
            "reward.function to the reward of these rows."
        )


async def open_scorer(config: RewardConfig, policy: Path) -> Scorer:
    """The functions of `reward.function`, each in processes of its own unless it is known to be harmless; services and models in this one.

    Args:
        config: of rewards.
        policy: folder of the model whose responses are scored.

    Raises:
        ConfigError: one can't be loaded.
    """
    terms = parse_terms(config.function)
    return CombinedScorer(terms, [await _open(term.name, config, policy) for term in terms])


async def _open(name: str, config: RewardConfig, policy: Path) -> Scorer:
    if is_described(name):
        return _described(read_description(name), config, policy)
    if name in HARMLESS:
        return InlineScorer(load_reward(name))
    return await ScorerPool.open(
        name, workers=config.num_workers, timeout_s=config.timeout_s, memory_mb=config.memory_mb
    )


def _described(description: Remote | Model, config: RewardConfig, policy: Path) -> Scorer:
    if isinstance(description, Remote):
        from rl_trainer.rewards.remote import RemoteScorer  # aiohttp: other rewards do without it

        return RemoteScorer(description, config.timeout_s)
    from rl_trainer.backends.reward_model import RewardModelScorer  # torch: likewise

    path = Path(description.path).expanduser()
    if (path / "tokenizer.json").exists() and load_tokenizer(path).get_vocab() != load_tokenizer(policy).get_vocab():
        raise ConfigError(
            f"The reward model {path} has another vocabulary than the policy {policy}; it scores token ids, which must mean the same to both."
        )
    return RewardModelScorer(description)
