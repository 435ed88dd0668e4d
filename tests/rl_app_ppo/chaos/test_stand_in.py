"""The stand-in for the model notices every change of what it was trained on."""

from __future__ import annotations

import pytest

from rl_app_ppo.chaos.stand_in import ActorState, PlaneRun, expected, respond, update


def test_weights_depend_on_all_responses_but_not_on_their_order():
    responses = [respond("w", row, i) for row in range(3) for i in range(2)]
    trained = update(ActorState(weights="w"), responses)
    assert trained == update(ActorState(weights="w"), responses[::-1])
    assert trained.trained == [[(row, i) for row in range(3) for i in range(2)]]
    for others in (responses[1:], [*responses, responses[0]], [respond("v", 0, 0), *responses[1:]]):
        assert update(ActorState(weights="w"), others).weights != trained.weights
    assert update(ActorState(weights="v"), responses).weights != trained.weights


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_trains_every_prompt_of_its_steps(staleness):
    run = PlaneRun(folder="", max_staleness=staleness, steps=3, batch=4, n=2)
    final = expected(run)
    assert (final.version, [len(step) for step in final.trained]) == (3, [8, 8, 8])
    rows = {row for step in final.trained for row, _ in step}
    assert len(rows) == 12
    assert final.weights != expected(PlaneRun(folder="", max_staleness=1 - staleness, steps=3)).weights
