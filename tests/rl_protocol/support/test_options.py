"""Options: checks of single values, of groups, and the key in each message."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass
from pathlib import Path

import numpy as np
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
    bonus: float = option(0.0, "bonus", lt=math.inf)
    kind: str = option("", "kind", choices=("", "linear", "cosine"))
    mode: str = option("a", "mode", choices=("a", "b"))

    def check(self, path: str) -> None:
        require(self.kind != "linear" or self.steps > 1, f"{path}steps", f"above 1 with {path}kind=linear", self.steps)


@dataclass(frozen=True, kw_only=True)
class Model(Options):
    optim: Optim = group(Optim, "optimizer")
    frozen: bool = option(False, "frozen")
    layers: tuple[int, ...] = option((), "layers")
    weight: float = option(0.0, "weight")
    weights: tuple[float, ...] = option((), "weights")


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (Optim, {"steps": "64"}, "steps must be an integer; got '64'."),
        (Optim, {"steps": 1.5}, "steps must be an integer; got 1.5."),
        (Optim, {"steps": True}, "steps must be an integer; got True."),
        (Optim, {"lr": "1e-3"}, "lr must be a number; got '1e-3'."),
        (Optim, {"lr": None}, "lr must be a number; got None."),
        (Optim, {"lr": True}, "lr must be a number; got True."),
        (Optim, {"kind": Path("linear")}, f"kind must be text; got {Path('linear')!r}."),
        (Model, {"frozen": "false"}, "frozen must be true or false; got 'false'."),
        (Model, {"frozen": 1}, "frozen must be true or false; got 1."),
        (Model, {"layers": [1]}, "layers must be a tuple; got [1]."),
        (Model, {"weight": math.nan}, "weight must be a number; got nan."),
        (Model, {"weights": (1.0, math.nan)}, "weights must be a number; got nan."),
    ],
)
def test_a_value_of_another_type_is_refused(kind, values, message):
    with pytest.raises(ConfigError) as caught:
        kind(**values)
    assert str(caught.value) == message


def test_the_docstring_has_the_help_of_each_own_option():
    class Warm(Optim):
        """A schedule.

        >>> Warm.__name__
        'Warm'
        """

        warmup: int = option(0, "steps of warm-up")

    assert Warm.__doc__ == "A schedule.\n\n>>> Warm.__name__\n'Warm'\n\nOptions:\n    warmup: steps of warm-up"


def test_numbers_of_numpy_and_integers_for_numbers_are_accepted():
    assert Optim(lr=1, decay=np.float32(0.5), steps=np.int64(2)).lr == 1


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
        ("bonus", math.inf, "finite"),
        ("bonus", -math.inf, "finite"),
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


@pytest.mark.parametrize("value", [[[1]], [{"a": 1}], [True], [1.5], ["one"], "1, x", [None]])
def test_a_list_takes_no_element_of_another_type(value):
    with pytest.raises(ConfigError) as caught:
        build(Model, {"layers": value}, "model.")
    assert str(caught.value) == f"model.layers must be a list of int; got {value!r}."


def test_the_elements_of_a_list_may_be_text():
    model = build(Model, {"layers": "1, 2", "weights": ["0.5", 2]})
    assert (model.layers, model.weights) == ((1, 2), (0.5, 2.0))
