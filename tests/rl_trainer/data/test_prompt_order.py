"""The prompts that each step takes."""

from __future__ import annotations

import pytest

from rl_protocol import ConfigError
from rl_trainer import (
    PromptOrder,
)


def test_the_order_of_prompts_covers_each_epoch_once_and_can_be_asked_for_at_any_step():
    order = PromptOrder(10, 4, seed=3)
    rows = [row for step in range(5) for row in order.rows(step)]
    assert sorted(rows[:10]) == list(range(10))
    assert sorted(rows[10:]) == list(range(10))
    assert rows[:10] != rows[10:]
    assert PromptOrder(10, 4, seed=3).rows(2) == rows[8:12]
    assert PromptOrder(10, 4, seed=4).rows(0) != order.rows(0)
    with pytest.raises(ConfigError, match=r"PromptOrder\.size must be at least 1, .* got 0"):
        PromptOrder(0, 1, 0)
