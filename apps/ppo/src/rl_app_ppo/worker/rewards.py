"""Open the functions of `reward.function` in the process that scores responses."""

from __future__ import annotations

from pathlib import Path

from rl_app_ppo.config.schema import RewardConfig
from rl_app_ppo.inputs.tokenizer import load_tokenizer
from rl_protocol import ConfigError
from rl_trainer.rewards import CombinedScorer, InlineScorer, Scorer, ScorerPool, functions_of, load_reward, parse_terms
from rl_trainer.rewards.loading import HARMLESS
from rl_trainer.rewards.scorer_toml import (
    JudgeConfig,
    RemoteScorerConfig,
    ScorerConfig,
    ServedModelConfig,
    is_scorer_toml,
    read_scorer_toml,
)


async def open_scorer(config: RewardConfig, policy: Path) -> Scorer:
    """Open the functions of `reward.function`.

    Functions run in separate processes unless they are known to be harmless; services and reward
    models run in this process.

    Args:
        config: the settings of rewards.
        policy: folder of the model whose responses are scored.

    Raises:
        ConfigError: a function can't be loaded.
    """
    terms = parse_terms(config.function)
    return CombinedScorer(terms, [await _open(name, config, policy) for name in functions_of(terms)])


async def _open(name: str, config: RewardConfig, policy: Path) -> Scorer:
    if is_scorer_toml(name):
        return _described(read_scorer_toml(name), config, policy)
    if name in HARMLESS:
        return InlineScorer(load_reward(name))
    return await ScorerPool.open(
        name, workers=config.num_workers, timeout_s=config.timeout_s, memory_mb=config.memory_mb
    )


def _described(description: ScorerConfig, config: RewardConfig, policy: Path) -> Scorer:
    if isinstance(description, RemoteScorerConfig):
        from rl_trainer.rewards.services.remote import RemoteScorer  # imports aiohttp

        return RemoteScorer(description, config.timeout_s)
    if isinstance(description, JudgeConfig):
        from rl_trainer.rewards.services.judge import JudgeScorer  # imports aiohttp

        return JudgeScorer(description, config.timeout_s)
    if isinstance(description, ServedModelConfig):
        from rl_trainer.rewards.services.served_model import ServedModelScorer  # imports aiohttp

        return ServedModelScorer(description, config.timeout_s)
    from rl_trainer.backends.reward_model import RewardModelScorer  # imports torch

    path = Path(description.path).expanduser()
    if (path / "tokenizer.json").exists() and load_tokenizer(path).get_vocab() != load_tokenizer(policy).get_vocab():
        raise ConfigError(
            f"The reward model {path} has another vocabulary than the policy {policy}; it scores token ids, so both must have the same vocabulary."
        )
    return RewardModelScorer(description)
