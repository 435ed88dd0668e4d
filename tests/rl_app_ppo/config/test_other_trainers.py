"""Keys of other trainers get a hint at keys that exist, and TRL's are those of the guide."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rl_app_ppo.config.loading import options, resolve
from rl_app_ppo.config.other_trainers import WORDS, describe_other
from rl_protocol import ConfigError

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "from_trl.md"


def guide() -> dict[str, set[str]]:
    """The arguments of `GRPOConfig` in the guide's table, and our keys in their rows."""
    found: dict[str, set[str]] = {}
    table = GUIDE.read_text().partition("| `GRPOConfig` | key |")[2]
    for line in re.findall(r"^\| `.*\|$", table, re.M):
        theirs, ours = (re.findall(r"`(\w[\w.]*)", cell) for cell in line.split("|")[1:3])
        for argument in theirs:
            found.setdefault(argument, set()).update(ours)
    return found


@pytest.mark.parametrize(("argument", "ours"), guide().items())
def test_an_argument_of_trl_is_named_as_in_the_guide(argument, ours):
    named = set(re.findall(r"\w+(?:\.\w+)+", describe_other(argument)))
    assert named
    assert named <= ours & {option.key for option in options()}


def test_an_argument_of_trl_is_an_error_with_its_key():
    with pytest.raises(
        ConfigError, match=r"Unknown key 'learning_rate'\. It is a key of TRL; here it is actor\.optim\.lr\."
    ):
        resolve(["learning_rate=1e-5"])


@pytest.mark.parametrize(("word", "setting"), WORDS.items())
def test_a_plain_word_is_no_key_and_hints_at_one(word, setting):
    key, _, value = setting.partition("=")
    assert key in {"algorithm", *(option.key for option in options())}
    with pytest.raises(ConfigError, match=re.escape(setting)):
        resolve([f"{word}=1"])
    if value:
        assert resolve([setting]).changed


def test_a_key_of_no_trainer_has_no_hint():
    assert describe_other("number_of_generations") == ""


def settings() -> list[list[str]]:
    """The settings with values in each row of the guide's table."""
    table = GUIDE.read_text().partition("| `GRPOConfig` | key |")[2]
    cells = [line.split("|")[2] for line in re.findall(r"^\| `.*\|$", table, re.M)]
    return [words for cell in cells if (words := re.findall(r"`([\w.]+=[^`]+)`", cell))]


@pytest.mark.parametrize("words", settings(), ids=" ".join)
def test_the_settings_of_a_row_of_the_guide_are_complete(words):
    assert resolve(words).config
