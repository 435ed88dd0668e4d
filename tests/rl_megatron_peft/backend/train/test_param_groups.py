"""Layouts that can't train all weights."""

from __future__ import annotations

import dataclasses

import pytest

from rl_megatron_peft import (
    Layout,
    ModelShape,
)
from rl_protocol import ConfigError


@pytest.mark.parametrize(
    ("family", "layout", "message"),
    [
        (
            "qwen2",
            {"pipeline": 2},
            "with a tied output layer needs the embedding and the output layer in one stage; got pipeline=2",
        ),
        ("llama", {"tensor": 2}, "a vocabulary divisible by tensor=2; got 15"),
    ],
)
def test_layouts_in_which_not_all_weights_can_be_trained_are_refused(policy, ranks, models, family, layout, message):

    from rl_megatron_peft.backend.train.param_groups import model_parameters

    cut = dataclasses.replace(ranks, layout=Layout(**layout))
    with pytest.raises(ConfigError, match=message):
        list(model_parameters(policy.model, ModelShape.read(models / family), cut))
