"""Advantage estimators over 1,024 ragged responses of 16 to 1,024 tokens, eight to a prompt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rl_protocol import RowKey
from rl_trainer.algorithms.advantages import ADVANTAGE_ESTIMATORS, AdvantageInputs

ROWS, SESSIONS = 1024, 8
ESTIMATORS = (
    "gae",
    "grpo",
    "dr_grpo",
    "grpo_passk",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "opo",
    "gpg",
)


def make_inputs() -> AdvantageInputs:
    """Random scores, values and lengths; every token is trained on."""
    rng = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(16, 1025, ROWS))]).astype(np.int64)
    return AdvantageInputs(
        keys=[RowKey(f"prompt-{row // SESSIONS}", row % SESSIONS, 0) for row in range(ROWS)],
        offsets=offsets,
        mask=np.ones(offsets[-1], dtype=bool),
        scores=rng.integers(0, 2, ROWS).astype(np.float64),
        values=rng.normal(size=offsets[-1]),
        reward_baselines=rng.integers(0, 2, ROWS).astype(np.float64),
        gamma=0.99,
        lam=0.95,
    )


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimator(benchmark: Any, name: str) -> None:
    """Time one estimator, including the grouping of rows into sessions."""
    estimate = ADVANTAGE_ESTIMATORS.get(name).estimate
    benchmark.group = "advantages of 1,024 responses"
    benchmark.extra_info.update(operation=benchmark.group, subject=name, rows=ROWS)
    benchmark.pedantic(estimate, setup=lambda: ((make_inputs(),), {}), rounds=7, warmup_rounds=1)
