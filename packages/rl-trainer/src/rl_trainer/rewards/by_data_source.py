"""Selects the reward function by the `data_source` of each row, as verl does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from rl_trainer.rewards.loading import load_built_in

REWARDS: Mapping[str, str] = {
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
}
"""data_source -> built-in reward function."""


def score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, object] | None = None
) -> Mapping[str, float | str]:
    """The result of the reward function for `data_source`.

    Raises:
        ValueError: there is no built-in function for that data source.
    """
    if data_source not in REWARDS:
        raise ValueError(
            f"by_data_source knows no reward for data_source={data_source!r}; it knows {', '.join(REWARDS)}. Set load_reward.name to the one to use."
        )
    return _loaded(REWARDS[data_source])(data_source, solution_str, ground_truth, extra_info)


@functools.cache
def _loaded(name: str) -> Callable[..., Any]:
    return load_built_in(name)
