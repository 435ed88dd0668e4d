"""Learning-rate schedules."""

from __future__ import annotations

import pytest

from rl_protocol import ConfigError
from rl_trainer import OptimConfig


def test_schedules_by_hand():
    cosine = OptimConfig(lr_scheduler_type="cosine", lr_warmup_steps=2, lr_decay_steps=6, min_lr_ratio=0.2)
    found = [cosine.lr_factor(step) for step in (1, 2, 4, 6, 10)]
    assert found == pytest.approx([0.5, 1.0, 0.6, 0.2, 0.2], rel=1e-12)
    warmed_up = OptimConfig(lr_warmup_steps=4)
    assert [warmed_up.lr_factor(step) for step in (1, 3, 4, 9)] == [0.25, 0.75, 1.0, 1.0]
    assert OptimConfig(lr_scheduler_type="linear", lr_decay_steps=4).lr_factor(1) == 0.75


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr_scheduler_type": "cosin"}, r"lr_scheduler_type must be one of"),
        ({"lr_scheduler_type": "cosine"}, r"lr_decay_steps must be greater than"),
        ({"lr_decay_steps": 10}, r"lr_decay_steps must be .* 0 with constant"),
        ({"min_lr_ratio": 0.5}, r"min_lr_ratio must be 0 with constant"),
    ],
)
def test_schedules_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        OptimConfig(**settings)
