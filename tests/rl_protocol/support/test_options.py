"""Options: checks of single values, of groups, and the key in each message."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass

import pytest

from rl_protocol import ConfigError
from rl_protocol.support.options import Options, build, group, option, require


@dataclass(frozen=True, kw_only=True)
class Optim(Options):
    lr: float = option(0.1, "learning rate", gt=0, lt=math.inf)
    decay: float = option(0.0, "decay", ge=0, lt=1)
    steps: int = option(1, "steps", ge=1)
    share: float = option(0.5, "share", gt=0, le=1)
    most: int = option(1, "most", le=8)
    below: int = option(1, "below", lt=8)
    kind: str = option("", "kind", choices=("", "linear", "cosine"))
    mode: str = option("a", "mode", choices=("a", "b"))

    def check(self, path: str) -> None:
        require(self.kind != "linear" or self.steps > 1, f"{path}steps", f"above 1 with {path}kind=linear", self.steps)


@dataclass(frozen=True, kw_only=True)
class Model(Options):
    optim: Optim = group(Optim, "optimizer")


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("lr", 0.0, "greater than 0 and finite"),
        ("lr", math.inf, "greater than 0 and finite"),
        ("lr", math.nan, "greater than 0 and finite"),
        ("decay", 1.0, "in [0, 1)"),
        ("decay", -0.1, "in [0, 1)"),
        ("steps", 0, "at least 1"),
        ("share", 0.0, "in (0, 1]"),
        ("share", 1.5, "in (0, 1]"),
        ("most", 9, "at most 8"),
        ("below", 8, "less than 8"),
    ],
)
def test_a_value_out_of_bounds_names_its_key_and_bounds(name, value, rule):
    with pytest.raises(ConfigError) as alone:
        Optim(**{name: value})
    assert str(alone.value) == f"{name} must be {rule}; got {value!r}."
    with pytest.raises(ConfigError) as inside:
        build(Model, {"optim": {name: value}}, path="actor.")
    assert str(inside.value) == f"actor.optim.{name} must be {rule}; got {value!r}."


@pytest.mark.parametrize("value", [1e-9, 1e9])
def test_values_within_bounds_are_accepted(value):
    assert Optim(lr=value, decay=0.0, share=1.0, most=8, below=7).lr == value


def test_a_value_that_is_no_choice_gets_the_nearest():
    with pytest.raises(ConfigError) as caught:
        Optim(kind="cosin")
    assert str(caught.value) == "kind must be empty or one of linear, cosine; got 'cosin'. Did you mean 'cosine'?"
    with pytest.raises(ConfigError, match="mode must be one of a, b; got 'z'"):
        Optim(mode="z")


def test_a_check_of_several_options_gets_the_path():
    with pytest.raises(ConfigError, match=r"^steps must be above 1 with kind=linear"):
        Optim(kind="linear")
    with pytest.raises(ConfigError, match=r"^optim\.steps must be above 1 with optim\.kind=linear"):
        build(Model, {"optim": {"kind": "linear"}})
    with pytest.raises(ConfigError, match=r"^steps must be"):  # the path does not outlast `build`
        Optim(kind="linear")


def test_groups_are_built_from_mappings_and_keep_other_defaults():
    model = build(Model, {"optim": {"lr": 0.2}})
    assert model == Model(optim=Optim(lr=0.2))
    assert build(Model, {}) == Model()
    assert pickle.loads(pickle.dumps(model)) == model
