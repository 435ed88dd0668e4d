"""Results of reward functions: scores, and failures that say what was wrong."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest
import torch

from rl_protocol.support.trusted_files import given_files, load_object, variables_for
from rl_trainer.rewards import (
    Failure,
    Sample,
    Scored,
    load_reward,
)
from rl_trainer.rewards.functions import run
from rl_trainer.rewards.scorer import Outcome, failure_of, outcome_of


def test_a_number_or_a_mapping_is_a_score():
    assert outcome_of(True) == Scored(numbers={"acc": 1.0, "score": 1.0})
    assert outcome_of({"score": 0.5, "acc": 1, "pred": "7"}) == Scored(
        numbers={"acc": 1.0, "score": 0.5}, texts={"pred": "7"}
    )


def test_a_message_moves_no_cursor_of_a_terminal():
    failure = failure_of(ValueError("\x1b[2J\x07 wrong\r\n\tindeed"))
    assert failure.message == "raised ValueError: ?[2J? wrong?\n\tindeed"


def test_texts_that_a_response_has_broken_can_be_sent_on():
    """A function may parse a response such as `{"answer": "\\ud83d"}`."""
    broken = json.loads(r'"7 \ud83d"')
    found = outcome_of({"score": 1.0, "pred": broken})
    assert found == Scored(numbers={"acc": 1.0, "score": 1.0}, texts={"pred": "7 ?"})
    failure = failure_of(ValueError(broken))
    assert failure.message == "raised ValueError: 7 ?"
    assert msgspec.msgpack.decode(msgspec.msgpack.encode([found, failure]), type=list[Outcome]) == [found, failure]


def test_an_exception_whose_message_raises_is_a_failure():
    class MuteError(Exception):
        def __str__(self):
            return self.reason

    assert failure_of(MuteError()).message == "raised MuteError: its __str__ raised AttributeError"


@pytest.mark.parametrize(
    "returned",
    [np.float32(0.5), np.longdouble(0.5), np.array(0.5), torch.tensor(0.5), torch.tensor(0.5).requires_grad_()],
)
def test_arrays_and_tensors_without_dimensions_are_numbers(returned):
    half = Scored(numbers={"acc": 0.5, "score": 0.5})
    assert outcome_of(returned) == outcome_of({"score": returned}) == half


@pytest.mark.parametrize(
    "returned",
    [
        None,
        "1",
        torch.tensor([1.0]),
        torch.tensor(float("nan")),
        float("nan"),
        float("inf"),
        [1.0],
        {"acc": 1.0},
        {"score": "1"},
        {"score": 1, "x": None},
        {},
    ],
)
def test_anything_else_is_a_failure_that_says_what_it_was(returned):
    outcome = outcome_of(returned)
    assert isinstance(outcome, Failure)
    assert outcome.kind == "no_number"
    assert "returned" in outcome.message


@pytest.mark.parametrize(
    ("returned", "shown"),
    [
        ("r" * 10**6, f"'{'r' * 199}..."),
        ({f"k{i:03}": 1 for i in range(1000)}, str([f"k{i:03}" for i in range(30)])[:200] + "..."),
    ],
)
def test_a_failure_shows_the_start_of_a_long_result(returned, shown):
    outcome = outcome_of(returned)
    assert isinstance(outcome, Failure)
    assert shown in outcome.message
    assert len(outcome.message) < 300


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "raised MemoryError (the limit is ScorerPool.memory_mb)"),
        (MemoryError("8 GiB"), "raised MemoryError: 8 GiB (the limit is ScorerPool.memory_mb)"),
    ],
)
def test_a_lack_of_memory_names_the_limit(error, message):
    assert failure_of(error).message == message


def test_a_failure_names_the_innermost_line_of_the_file_of_the_function(tmp_path):
    """The exception may come from deep in a library; users need the line in their own file."""
    path = tmp_path / "mine.py"
    path.write_text(
        "import json\n"
        "def parse(text):\n"
        "    return json.loads(text)\n"
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return parse(solution_str)['score']\n"
        "async def later(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return parse(solution_str)['score']\n"
        "def no_arguments():\n"
        "    return 1.0\n"
    )
    environment = variables_for(given_files([path], "trust"))
    samples = [Sample(data_source="s", solution_str=text, ground_truth="") for text in ("{", "{}", '{"score": 1}')]
    for name, line in (("score", 5), ("later", 7)):
        bad, missing, good = run(load_reward(f"{path}:{name}", environment), samples, 10)
        assert (bad.where, missing.where) == (f"{path}:3", f"{path}:{line}")
        assert missing.description == f"raised KeyError: 'score' ({path}:{line})"
        assert good.numbers["score"] == 1.0
    (called,) = run(load_object(f"{path}:no_arguments", "function", environment), samples[:1], 10)
    assert (called.where, called.description) == (f"{path}:8", f"{called.message} ({path}:8)")
