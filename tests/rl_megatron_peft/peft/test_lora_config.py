"""LoraConfig's errors give the problem, the value, and the likely correction."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from rl_megatron_peft import TARGETS, LoraConfig
from rl_protocol import ConfigError


def test_defaults_cover_every_target():
    config = LoraConfig()
    assert config.target_modules == TARGETS
    assert config.scaling_of("model.layers.0.mlp.up_proj") == 2.0
    assert config.covers("model.layers.31.mlp.down_proj")
    assert not config.covers("lm_head")
    with pytest.raises(AttributeError):
        config.rank = 3  # type: ignore[misc]


def test_excluded_modules_are_matched_as_in_peft():
    config = LoraConfig(exclude=("model.layers.0.mlp.up_proj", "layers.1.self_attn.q_proj"))
    assert not config.covers("model.layers.0.mlp.up_proj")
    assert not config.covers("model.layers.1.self_attn.q_proj")
    assert config.covers("model.layers.11.self_attn.q_proj")
    assert config.covers("model.layers.10.mlp.up_proj")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"rank": 0}, "rank must be an integer >= 1; got 0"),
        ({"rank": 2.5}, "rank must be an integer >= 1; got 2.5"),
        ({"rank": True}, "rank must be an integer >= 1; got True"),
        ({"rank": "8"}, "rank must be an integer >= 1; got '8'"),
        ({"alpha": 0.0}, "alpha must be a finite number above 0; got 0.0"),
        ({"alpha": math.inf}, "alpha must be a finite number above 0; got inf"),
        ({"alpha": math.nan}, "alpha must be a finite number above 0; got nan"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1; got 1.0"),
        ({"dropout": -0.1}, "dropout must be at least 0 and below 1"),
        ({"target_modules": ()}, "target_modules is empty"),
        ({"target_modules": "q_proj"}, "target_modules must be a tuple of names or a compiled .*; got 'q_proj'"),
        ({"target_modules": ["q_proj"]}, "must be a tuple of names"),
        ({"target_modules": (1,)}, "must be a tuple of names"),
        ({"target_modules": ("q_porj",)}, r"Unknown module 'q_porj' in target_modules.*Did you mean 'q_proj'\?"),
        ({"target_modules": ("xyzzy",)}, r"Unknown module 'xyzzy' in target_modules; known are .*down_proj\.$"),
        ({"target_modules": ("q_proj", "q_proj")}, "target_modules names a module twice"),
        ({"exclude": ("layers.0.up_prj",)}, r"'layers.0.up_prj' in exclude.*Did you mean 'up_proj'\?"),
        (
            {"target_modules": re.compile("Q_PROJ", re.IGNORECASE)},
            r"target_modules must have its flags in the .*\(\?i\)",
        ),
        ({"exclude": re.compile("q _ proj", re.VERBOSE)}, "exclude must have its flags in the regular expression"),
        ({"exclude": ("q_proj",)}, "'q_proj' is in both target_modules and exclude"),
    ],
)
def test_wrong_settings_are_named(setting: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message) as caught:
        LoraConfig(**setting)
    assert caught.value.field == next(iter(setting))


def test_flags_in_a_regular_expression_are_stored_with_it():
    config = LoraConfig(target_modules=re.compile(r"(?i).*\.O_PROJ"))
    stored = LoraConfig.from_manifest(config.manifest_fields())
    assert stored == config
    assert stored.covers("model.layers.0.self_attn.o_proj")
