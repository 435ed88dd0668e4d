"""Reward functions get names that the reward processes understand."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from rl_app_ppo.api.reward_argument import check_rewards, reward_function
from rl_protocol import ConfigError
from rl_protocol.support.trusted_files import given_files, variables_for
from rl_trainer.rewards.functions import exact_match
from rl_trainer.rewards.loading import check_reward, load_reward


def test_a_name_stays_as_it_is():
    modules = check_rewards("0.5*math,0.5*gsm8k", None)
    assert reward_function("0.5*math,0.5*gsm8k", None, modules.written(None)) == "0.5*math,0.5*gsm8k"


def test_a_function_is_loaded_from_a_file_of_its_own(tmp_path: Path):
    files = check_rewards(exact_match, None).written(tmp_path)
    name = reward_function(exact_match, None, files)
    assert name == f"{files['exact_match']}:exact_match"
    allowed = variables_for(given_files(files.values(), "reward"))
    check_reward(name, allowed)
    assert load_reward(name, allowed)("sums", "1", "1") == {"score": 1.0, "acc": 1.0}


def test_functions_and_names_are_added_up_with_their_weights(tmp_path: Path):
    rewards = [exact_match, "math"]
    files = check_rewards(rewards, [0.75, 0.25]).written(tmp_path)
    file = files["exact_match"]
    assert reward_function(rewards, [0.75, 0.25], files) == f"0.75*{file}:exact_match,0.25*math"
    assert reward_function(rewards, None, files) == f"{file}:exact_match,math"


def test_a_file_that_was_changed_is_written_again(tmp_path: Path):
    (file,) = check_rewards(exact_match, None).written(tmp_path).values()
    before = file.read_text()
    file.write_text("import os")
    assert check_rewards(exact_match, None).written(tmp_path) == {"exact_match": file}
    assert file.read_text() == before


def few(solution_str):
    return 0.0


def swapped(solution_str, ground_truth, data_source=None, extra_info=None):
    return 0.0


def twice(data_source, solution_str, ground_truth, extra_info):
    return 0.0


@pytest.mark.parametrize(
    ("reward", "weights", "words"),
    [
        ([], None, "reward is empty"),
        (3, None, r"reward \(reward\.function\) must be .*\(int\)"),
        (functools.partial(twice), None, r"must be a name, a function written with `def`.*\(partial\)"),
        (
            few,
            None,
            r"reward 'few' is called with 4 positional arguments, which fails: .* Write it as def few\(data_source, ",
        ),
        (swapped, None, r"'swapped' is called with \(data_source, .* its parameter 1 is 'solution_str'\. Write it as"),
        ([twice, twice], None, "two functions are named 'twice'"),
        (twice, ["a"], "reward_weights must be numbers; got 'a'"),
        ("math", [0.5, 0.5], r"reward_weights must have one weight per reward \(1\); got 2"),
    ],
)
def test_a_wrong_reward_is_refused(reward, weights, words):
    with pytest.raises(ConfigError, match=words):
        check_rewards(reward, weights)


def test_a_cache_whose_name_would_split_the_reward_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"model\.cache_dir must have no comma"):
        check_rewards(exact_match, None).written(tmp_path / "a,b")
