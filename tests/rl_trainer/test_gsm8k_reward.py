"""The rewards that verl's data sources choose there: cases worked out by hand from its rules."""

from __future__ import annotations

import pytest

from rl_trainer.rewards import load_reward

STRICT = [
    ("18 eggs.\n#### 18", "18", 1.0, "18"),
    ("#### 18", "17", 0.0, "18"),
    ("the answer is 18", "18", 0.0, ""),  # no mark
    ("####18", "18", 0.0, ""),  # the mark needs its space
    ("####  18", "18", 0.0, ""),  # and one alone
    ("#### $18", "18", 0.0, ""),  # the number follows at once
    ("#### 1,234", "1234", 1.0, "1234"),
    ("#### -5", "-5", 1.0, "-5"),
    ("#### 0.5 dollars", "0.5", 1.0, "0.5"),
    ("#### 18.", "18", 0.0, "18."),  # the full stop counts
    ("#### 18.0", "18", 0.0, "18.0"),  # text, not mathematics
    ("#### 3\nno:\n#### 4", "4", 1.0, "4"),  # the last one
    ("#### 4" + "x" * 295, "4", 0.0, ""),  # before the last 300 characters
    ("#### 4" + "x" * 294, "4", 1.0, "4"),  # these are 300
    ("", "", 0.0, ""),
]
FLEXIBLE = [
    ("first 3, then 18", "18", 1.0, "18"),
    ("it is 18 .", "18", 1.0, "18"),  # "." is no number
    ("it is 18.", "18", 0.0, "18."),
    ("1,234", "1234", 0.0, "1,234"),  # separators stay
    ("#### 7", "7", 1.0, "7"),
    ("none", "none", 0.0, ""),
    (".", ".", 0.0, ""),
]


@pytest.mark.parametrize(
    ("name", "response", "truth", "score", "pred"),
    [("gsm8k", *case) for case in STRICT] + [("gsm8k_flexible", *case) for case in FLEXIBLE],
)
def test_a_response_scores_as_verl_scores_it(name, response, truth, score, pred):
    assert load_reward(name)("openai/gsm8k", response, truth) == {"score": score, "acc": score, "pred": pred}


def test_the_data_source_chooses_the_reward():
    judge = load_reward("by_data_source")
    assert judge("openai/gsm8k", "the answer is 18", "18")["score"] == 0.0
    assert judge("openai/gsm8k", "#### 18", "18")["score"] == 1.0
    assert judge("lighteval/MATH", r"so \boxed{\frac{2}{4}}", r"\frac{1}{2}")["score"] == 1.0
    with pytest.raises(ValueError, match=r"no reward for data_source='mine'; it knows openai/gsm8k"):
        judge("mine", "18", "18")
