"""GSM8K scores as in verl, with cases worked out from its rules."""

from __future__ import annotations

import pytest

from rl_trainer.rewards import load_reward

STRICT = [
    ("18 eggs.\n#### 18", "18", 1.0, "18"),
    ("#### 18", "17", 0.0, "18"),
    ("the answer is 18", "18", 0.0, ""),  # no mark
    ("####18", "18", 0.0, ""),  # the mark needs a space
    ("####  18", "18", 0.0, ""),  # exactly one space
    ("#### $18", "18", 0.0, ""),  # the number must follow directly
    ("#### 1,234", "1234", 1.0, "1234"),
    ("#### -5", "-5", 1.0, "-5"),
    ("#### 0.5 dollars", "0.5", 1.0, "0.5"),
    ("#### 18.", "18", 0.0, "18."),  # the full stop counts
    ("#### 18.0", "18", 0.0, "18.0"),  # compared as text
    ("#### 3\nno:\n#### 4", "4", 1.0, "4"),  # the last one counts
    ("#### 4" + "x" * 295, "4", 0.0, ""),  # before the last 300 characters
    ("#### 4" + "x" * 294, "4", 1.0, "4"),  # within the last 300 characters
    ("", "", 0.0, ""),
]
FLEXIBLE = [
    ("first 3, then 18", "18", 1.0, "18"),
    ("it is 18 .", "18", 1.0, "18"),  # "." is not a number
    ("it is 18.", "18", 0.0, "18."),
    ("1,234", "1234", 0.0, "1,234"),  # separators are kept
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
