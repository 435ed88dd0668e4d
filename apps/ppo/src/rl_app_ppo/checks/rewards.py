"""Check the functions of `reward.function` without importing them, and settings by source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rl_app_ppo.config.schema import AppConfig, RewardConfig
from rl_protocol import ConfigError
from rl_trainer.data.prompt_rows import PromptDataset
from rl_trainer.graph.config_checks import trains_rows
from rl_trainer.rewards import check_reward, parse_terms, unscored
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


def check_sources(config: AppConfig, data: Mapping[str, PromptDataset]) -> None:
    """Check the data sources of rows: of all where a setting names one, else of the first.

    Args:
        config: the configuration of the run.
        data: rows by split.

    Raises:
        ConfigError: a setting names a source that no row has, nothing is trained on the rows of
            one, or as `check_source`.
    """
    named = [term.source for term in parse_terms(config.reward.function) if term.source]
    every = bool(named or config.algorithm.by_source)
    found = {split: _sources(rows, every) for split, rows in data.items()}
    present = dict.fromkeys(source for sources in found.values() for source in sources)
    for source in present:
        check_source(config.reward, source)
    _check_named("reward.function", named, present, "data")
    _check_named("algorithm.by_source", config.algorithm.sources, found["train"], "training data")
    for source in found["train"] if config.algorithm.by_source else ():
        if not trains_rows(config.algorithm, config.actor, source):
            raise ConfigError(
                f"algorithm.by_source leaves nothing to train on in rows of data_source={source!r}, which it does not name; add rl_coef=1@{source} "
                f"or sft_coef=1@{source}, or leave the rows out of data.train_files."
            )


def _sources(rows: PromptDataset, every: bool) -> list[str]:
    """The data sources of all rows or of the first, each once."""
    return list(dict.fromkeys(rows[i].data_source for i in range(len(rows) if every else min(1, len(rows)))))


def _check_named(key: str, named: Iterable[str], present: Iterable[str], what: str) -> None:
    for source in named:
        if source not in present:
            names = ", ".join(sorted(present))
            raise ConfigError(
                f"{key} names data_source={source!r}, which no row of the {what} has; the rows have {names}. Set one of these."
            )


def check_source(config: RewardConfig, data_source: str) -> None:
    """Check that a term of the reward counts for rows of `data_source`, and that by_data_source, if
    it is used for them, has a reward.

    Raises:
        ConfigError: there is none.
    """
    terms = parse_terms(config.function)
    if why := unscored(terms, data_source):
        raise ConfigError(f"reward.function {why}. Add a term, such as exact_match@{data_source}, or one without @.")
    used = any(term.name == "by_data_source" and term.counts_for(data_source) for term in terms)
    if used and data_source not in REWARDS:
        raise ConfigError(
            f"reward.function=by_data_source has no reward for data_source={data_source!r}; it has rewards for {', '.join(REWARDS)}. Set "
            "reward.function to the reward of these rows."
        )
