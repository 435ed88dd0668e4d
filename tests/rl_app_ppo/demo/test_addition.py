"""The addition task: problems, splits, checker."""

from __future__ import annotations

import pytest

from rl_app_ppo.demo.addition import (
    ALPHABET,
    Problem,
    Split,
    careless_answer,
    careless_sum,
    make_split,
    make_sums,
    score,
)
from rl_protocol import ConfigError


def operands(problem: Problem) -> tuple[int, int]:
    a, b = problem.prompt.removesuffix("=").split("+")
    return int(a), int(b)


def test_answers_are_right_and_texts_have_fixed_width() -> None:
    split = make_split(0, train_size=4538, validation_size=512)
    for problem in (*split.train, *split.validation):
        assert problem.answer == f"{sum(operands(problem)):03d}"[::-1]
        assert len(problem.prompt) == 6
        assert set(problem.prompt + problem.answer) <= set(ALPHABET)


def test_splits_share_no_pair_of_operands_and_cover_all_problems() -> None:
    split = make_split(3, train_size=4538, validation_size=512)
    train = {frozenset(operands(p)) for p in split.train}
    validation = {frozenset(operands(p)) for p in split.validation}
    assert not train & validation
    assert len(train | validation) == 5050 == len(split.train) + len(split.validation)


def test_split_depends_on_the_seed_alone() -> None:
    split = make_split(1, train_size=100, validation_size=50)
    assert split == make_split(1, train_size=100, validation_size=50)
    assert split.validation == make_split(1, train_size=7, validation_size=50).validation
    assert split.train[:7] == make_split(1, train_size=7, validation_size=50).train
    assert split.validation != make_split(2, train_size=100, validation_size=50).validation


def test_both_orders_of_operands_occur() -> None:
    pairs = [operands(p) for p in make_split(0, train_size=1000, validation_size=1).train]
    larger_first = sum(a > b for a, b in pairs)
    assert 400 < larger_first < 600


@pytest.mark.parametrize(("train", "validation"), [(5000, 51), (-1, 10), (10, -1)])
def test_impossible_sizes_are_refused(train: int, validation: int) -> None:
    with pytest.raises(ConfigError, match="5050"):
        make_split(0, train_size=train, validation_size=validation)


def test_overlapping_split_is_refused_in_either_order() -> None:
    with pytest.raises(ConfigError, match="both splits"):
        Split(train=(Problem("37+45=", "280"),), validation=(Problem("45+37=", "280"),))


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("280", 1.0),
        ("082", 0.0),
        ("", 0.0),
        ("28", 0.0),
        ("2800", 0.0),
        ("280=", 0.0),
        (" 280", 0.0),
        ("280 ", 0.0),
        ("2 8 0", 0.0),
    ],
)
def test_score(response: str, right: float) -> None:
    assert score(response, "280") == right


@pytest.mark.parametrize(
    ("prompt", "careless", "right"),
    [("37+45=", "270", "280"), ("12+34=", "640", "640"), ("99+99=", "880", "891"), ("50+50=", "000", "001")],
)
def test_careless_answer_forgets_every_carry(prompt: str, careless: str, right: str) -> None:
    assert careless_answer(Problem(prompt, right)) == careless


def test_careless_answers_are_right_for_three_problems_in_ten() -> None:
    problems = make_split(0, train_size=4538, validation_size=512).train
    share = sum(score(careless_answer(p), p.answer) for p in problems) / len(problems)
    assert 0.27 < share < 0.33


def test_sums_are_the_same_problems_with_answers_as_people_write_them() -> None:
    """Also those of one and three digits."""
    sums, addition = (make(0, train_size=4538, validation_size=512) for make in (make_sums, make_split))
    for part in ("train", "validation"):
        ours, theirs = getattr(sums, part), getattr(addition, part)
        assert [p.prompt for p in ours] == [p.prompt for p in theirs]
        assert [p.answer for p in ours] == [str(sum(operands(p))) for p in ours]
    assert {len(p.answer) for p in sums.train} == {1, 2, 3}


@pytest.mark.parametrize(
    ("prompt", "careless"), [("37+45=", "72"), ("12+34=", "46"), ("99+99=", "88"), ("50+50=", "0"), ("95+12=", "7")]
)
def test_a_careless_sum_forgets_every_carry(prompt: str, careless: str) -> None:
    assert careless_sum(Problem(prompt, "")) == careless
