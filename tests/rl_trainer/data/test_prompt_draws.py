"""Prompts of steps that are sampled at once, and after a restart."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rl_trainer import PromptOrder
from rl_trainer.data.prompt_draws import PromptDraws

ORDER = PromptOrder(7, 2, seed=3)
DRAWS = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=20)


@given(draws=DRAWS, trained=st.sets(st.integers(1, 5)), more=DRAWS)
def test_every_prompt_is_drawn_once_for_a_step_that_is_trained(draws, trained, more):
    """Steps draw in any order; some are trained; a restart draws those of the others again."""
    first = PromptDraws(ORDER)
    drawn = [(step, first.draw(step, count)) for step, count in draws]
    for step in trained:
        first.trained(step)
    again = PromptDraws(ORDER)
    again.restore(first.position, first.untrained)
    rows = [row for step, rows in drawn if step in trained for row in rows]
    left = len(first.untrained)
    rows += again.draw(9, left) if left else []
    assert sorted(rows) == sorted(ORDER.take(0, first.position))
    later = [row for step, count in more for row in again.draw(step, count)]
    assert later == ORDER.take(first.position, len(later))


def test_what_is_drawn_again_comes_in_the_order_of_the_steps():
    draws = PromptDraws(ORDER)
    two, one = draws.draw(2, 2), draws.draw(1, 3)
    draws.rewind()
    assert draws.draw(1, 3) == one
    assert draws.draw(2, 2) == two
    assert draws.position == 5
