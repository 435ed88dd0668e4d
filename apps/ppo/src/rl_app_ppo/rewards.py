"""Reward functions by name: built-ins, and those that installed packages offer under the entry points `rl_app_ppo.rewards`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points

from rl_app_ppo.demo.arithmetic import score
from rl_protocol import ConfigError
from rl_protocol.ports import RewardFunction

ENTRY_POINTS = "rl_app_ppo.rewards"


def exact_match(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, object] | None = None
) -> Mapping[str, float]:
    """1 when the response is exactly the right answer, else 0; `acc` is the same."""
    del data_source, extra_info
    right = score(solution_str, ground_truth)
    return {"score": right, "acc": right}


BUILT_IN: dict[str, RewardFunction] = {"exact_match": exact_match}


def load_reward(name: str) -> RewardFunction:
    """The reward function of that name.

    Raises:
        ConfigError: there is none, two packages offer it, or it can't be imported.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    installed = entry_points(group=ENTRY_POINTS)
    found = [entry for entry in installed if entry.name == name]
    if len(found) != 1:
        known = ", ".join(sorted({*BUILT_IN, *(entry.name for entry in installed)}))
        what = "is not known" if not found else f"is offered by {len(found)} installed packages"
        raise ConfigError(
            f"reward.function={name!r} {what}; known are {known}. Install a package with an entry point in {ENTRY_POINTS!r}."
        )
    try:
        return found[0].load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"reward.function={name!r} of {found[0].value} can't be imported: {error}") from error
