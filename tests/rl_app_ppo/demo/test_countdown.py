"""The Countdown demo: its puzzles, what scores, and that no validation puzzle is trained on."""

from __future__ import annotations

import json

import pytest

from rl_app_ppo.demo.addition import Problem
from rl_app_ppo.demo.countdown import careless_answer, make_split, solution
from rl_app_ppo.demo.demos import DEMOS
from rl_app_ppo.demo.tokenizer import demo_tokenizer
from rl_protocol import ConfigError
from rl_trainer.rewards.countdown import score

PUZZLES = 4254
"""Of three digits: 729 triples, with 1 to 9 targets from 1 to 99 each."""


def test_a_puzzle_by_hand() -> None:
    problem = Problem("3 5 2 make 17: ", '{"numbers":[3,5,2],"target":17}')
    assert solution(problem) == "3*5+2"
    assert careless_answer(problem) == "3*5-2"
    assert problem in make_split(0, train_size=3700, validation_size=512).train
    product = Problem("3 5 2 make 30: ", '{"numbers":[3,5,2],"target":30}')
    assert (solution(product), careless_answer(product)) == ("3*5*2", "3*5+2")


def test_solutions_score_1_and_careless_answers_a_tenth() -> None:
    split = make_split(0, train_size=200, validation_size=100)
    for problem in (*split.train, *split.validation):
        assert score("countdown", solution(problem), problem.answer)["score"] == 1.0
    careless = [score("countdown", careless_answer(problem), problem.answer)["score"] for problem in split.train]
    assert set(careless) <= {0.1, 1.0}  # 2*2*2 is 2*2+4, but 2+2 is 2*2
    assert careless.count(0.1) > 190


def test_the_tokenizer_knows_all_puzzles_which_are_equally_long() -> None:
    tokenizer = demo_tokenizer(DEMOS["countdown"].vocabulary)
    split = make_split(0, train_size=3700, validation_size=512)
    tokens = [tokenizer.encode(problem.prompt).tokens for problem in (*split.train, *split.validation)]
    assert {len(one) for one in tokens} == {9}
    assert not any("<unk>" in one for one in tokens)
    assert "<unk>" not in tokenizer.encode(" ".join(map(solution, split.train))).tokens


def test_no_puzzle_is_in_both_splits_in_any_order_of_its_numbers() -> None:
    split = make_split(3, train_size=3700, validation_size=512)

    def puzzles(problems: tuple[Problem, ...]) -> set[tuple[tuple[int, ...], int]]:
        found = [json.loads(problem.answer) for problem in problems]
        return {(tuple(sorted(one["numbers"])), one["target"]) for one in found}

    assert not puzzles(split.train) & puzzles(split.validation)
    assert len({problem.prompt for problem in (*split.train, *split.validation)}) == 3700 + 512


def test_the_validation_split_depends_on_the_seed_alone() -> None:
    split = make_split(1, train_size=100, validation_size=50)
    assert split == make_split(1, train_size=100, validation_size=50)
    assert split.validation == make_split(1, train_size=7, validation_size=50).validation
    assert split.validation != make_split(2, train_size=100, validation_size=50).validation


@pytest.mark.parametrize(("train", "validation"), [(PUZZLES, 1), (-1, 10), (10, -1)])
def test_impossible_sizes_are_refused(train: int, validation: int) -> None:
    with pytest.raises(ConfigError, match=r"4254 puzzles.*data\.train_size"):
        make_split(0, train_size=train, validation_size=validation)
