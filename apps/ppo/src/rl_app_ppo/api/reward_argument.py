"""The rewards of `train()`: names as in `reward.function`, or Python functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from types import FunctionType
from typing import Any, cast

from rl_app_ppo.api.content_folder import keep
from rl_app_ppo.api.function_source import module_source
from rl_protocol import ConfigError
from rl_trainer.rewards.functions import misfit

Reward = str | Callable[..., Any]
"""A name as in `reward.function`, or a function in the form of verl's `compute_score`."""
_SIGNATURE = "(data_source, solution_str, ground_truth, extra_info)"


@dataclass(frozen=True)
class RewardModules:
    """The modules of the functions that are given as objects."""

    sources: Mapping[str, str] = field(default_factory=dict[str, str])
    """Name of the function -> source of a module that has it."""

    def written(self, cache: Path | None) -> dict[str, Path]:
        """Name of each function -> its file.

        Args:
            cache: folder into which the modules are written; None: they are not.

        Raises:
            OutputError: the cache can't be written.
        """
        if cache is None:
            return {name: Path(f"{name}.py") for name in self.sources}
        return {name: _written(name, source, cache) for name, source in self.sources.items()}


def check_rewards(reward: object, weights: Sequence[float] | None) -> RewardModules:
    """Check the arguments `reward` and `reward_weights`.

    Raises:
        ConfigError: a function can't run in another process; names it and says what to do.
    """
    rewards = _listed(reward)
    if not rewards:
        raise ConfigError("reward is empty; give at least one function.")
    if weights is not None and len(weights) != len(rewards):
        raise ConfigError(f"reward_weights must have one weight per reward ({len(rewards)}); got {len(weights)}.")
    if wrong := [weight for weight in weights or () if not isinstance(cast(object, weight), Real)]:
        raise ConfigError(f"reward_weights must be numbers; got {wrong[0]!r}.")
    sources: dict[str, str] = {}
    for one in rewards:
        if isinstance(one, str):
            continue
        function = _checked(one)
        if function.__name__ in sources:
            raise ConfigError(f"reward: two functions are named {function.__name__!r}; rename one of them.")
        sources[function.__name__] = module_source(function)
    return RewardModules(sources)


def reward_function(reward: object, weights: Sequence[float] | None, files: Mapping[str, Path]) -> str:
    """The value of `reward.function`.

    Args:
        reward: the argument, checked.
        weights: factor of each function in the sum; None: 1.
        files: the file of each function that is given as an object.
    """
    names = [
        one if isinstance(one, str) else f"{files[one.__name__]}:{one.__name__}"
        for one in cast("Sequence[str | FunctionType]", _listed(reward))
    ]
    if weights is None:
        return ",".join(names)
    return ",".join(f"{float(weight)!r}*{name}" for weight, name in zip(weights, names, strict=True))


def _written(name: str, source: str, cache: Path) -> Path:
    def fill(folder: Path) -> None:
        (folder / f"{name}.py").write_text(source, encoding="utf-8")
        (folder / f"{name}.py").chmod(0o600)  # reward functions load only from files that others can't write

    if "," in str(cache) or "*" in str(cache):
        raise ConfigError(f"model.cache_dir must have no comma and no star with a reward function; got {str(cache)!r}.")
    return keep(cache, "reward", fill) / f"{name}.py"


def _listed(reward: object) -> Sequence[object]:
    if isinstance(reward, str) or not isinstance(reward, Sequence):
        return [reward]
    return cast("Sequence[object]", reward)


def _checked(reward: object) -> FunctionType:
    if not inspect.isfunction(reward):
        what = type(reward).__name__
        raise ConfigError(
            f"reward (reward.function) must be a name, a function written with `def`, or a list of these; got {reward!r} ({what}). "
            f"Wrap it: def score{_SIGNATURE}: ..."
        )
    if why := misfit(inspect.signature(reward)):
        raise ConfigError(f"reward {reward.__name__!r} {why}. Write it as def {reward.__name__}{_SIGNATURE}: ...")
    return reward
