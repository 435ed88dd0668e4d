"""Mathematical comparison of answers."""

from __future__ import annotations

import asyncio

from reward_samples import scores

from rl_trainer.rewards import (
    Failure,
    Sample,
    ScorerPool,
)

GSM8K = [
    ("Janet sells 9 eggs. 9 * 2 = 18. #### 18", "18", 1.0),
    ("So the answer is 18.", "He has... #### 18", 1.0),
    ("The total is $1,234.", "1,234", 1.0),
    ("#### 17", "18", 0.0),
    ("I do not know", "18", 0.0),
    ("first #### 18 then #### 19", "18", 0.0),
]


MATH = [
    (r"Thus $x = \boxed{\frac{1}{2}}$.", r"\frac12", 1.0),
    (r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
    (r"\boxed{(1,2)}", r"(1, 2)", 1.0),
    (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", 1.0),
    (r"\boxed{x^2+2x+1}", r"(x+1)^2", 1.0),
    (r"$\frac{1}{3}$, no, \boxed{\frac{1}{4}}", r"\frac13", 0.0),
    (r"the answer is \boxed{3", "3", 0.0),
    (r"\boxed{4} no, \boxed{5}", "5", 1.0),
    (r"\boxed{4} no, \boxed{5}", "4", 0.0),
    (r"$x = \boxed{4}$ or $x = \boxed{5}$", r"\{4, 5\}", 1.0),
    ("The answer is \\boxed{5}.\n\n#### Check\n2 + 2 = 4, and one more.", "5", 1.0),
    ("#### Step 1\n\\boxed{4}\n#### Step 2\nno, \\boxed{5}\n#### Done", "5", 1.0),
    ("#### Step 1\n2 + 2 = 4\n#### 5", "5", 1.0),
]


def test_math_scoring_of_gsm8k_and_math_style_rows():
    async def run():
        pool = await ScorerPool.open("math", workers=1, timeout_s=60, memory_mb=4096)
        rows = [Sample(data_source="m", solution_str=text, ground_truth=truth) for text, truth, _ in [*GSM8K, *MATH]]
        try:
            return await pool.score([*rows, Sample(data_source="m", solution_str="1", ground_truth="")])
        finally:
            await pool.close()

    *outcomes, no_truth = asyncio.run(run())
    assert scores(outcomes) == [right for *_, right in [*GSM8K, *MATH]]
    assert outcomes[0].texts["pred"] == "18"
    assert isinstance(no_truth, Failure)
    assert "the ground truth '' can't be read as mathematics" in no_truth.message
