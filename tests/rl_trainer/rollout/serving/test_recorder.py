"""Trajectories from the recorded requests of a session.

Every token that the policy made counts once, in the context in which it was made.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_protocol import RolloutError
from rl_trainer.rollout.serving import Completion, Recorder
from rl_trainer.rollout.serving.recorder import common_end
from rl_trainer.rollout.session_turns import Trajectory
from rl_trainer.rollout.trajectory_stats import RolloutStats

PROMPT = (5, 6)


def completion(context, ids, version=0, told=0):
    return Completion(
        context=tuple(context),
        response_ids=tuple(ids),
        log_probs=(-0.5,) * len(ids),
        versions=(version,) * len(ids),
        told=told,
    )


def recorded(*completions):
    recorder = Recorder(PROMPT)
    for one in completions:
        recorder.add(one)
    return recorder.trajectories()


def trajectory(ids, made, version=0, turns=1):
    """`made` marks each token with + (made by the policy), - (observed) or . (neither)."""
    flags = tuple(sign == "+" for sign in made)
    return Trajectory(
        response_ids=tuple(ids),
        response_mask=flags,
        observed=tuple(sign == "-" for sign in made) if "." in made else None,
        log_probs=tuple(-0.5 if flag else 0.0 for flag in flags),
        weight_version=version,
        versions=((version, len(ids)),),
        stats=RolloutStats(turns=turns),
    )


@pytest.mark.parametrize(
    ("completions", "expected"),
    [
        ([], []),
        # A conversation is one trajectory; the policy did not make the agent's text in between.
        ([((5, 6), (7,)), ((5, 6, 7, 9, 9), (8, 1))], [((7, 9, 9, 8, 1), "+--++", 0, 2)]),
        # What the first context adds to the prompt is from the environment.
        ([((5, 6, 4), (7,)), ((5, 6, 4, 7, 9), (8,))], [((4, 7, 9, 8), "-+-+", 0, 2)]),
        # A reset starts another trajectory, whose context may have text of the policy.
        ([((5, 6), (7,)), ((5, 6, 4), (8,))], [((7,), "+"), ((4, 8), ".+")]),
        # Turns of the policy that the agent has rewritten are no observations; what follows is.
        (
            [((5, 6), (7, 8)), ((5, 6, 8, 9, 9), (2,), 0, 2), ((5, 6, 8, 9, 9, 2, 4), (3,), 0, 1)],
            [((7, 8), "++"), ((8, 9, 9, 2, 4, 3), ".--+-+", 0, 2)],
        ),
        # No more than the context has after the prompt.
        ([((5, 6), (7,)), ((5, 6, 9), (8,), 0, 3)], [((7,), "+"), ((9, 8), "-+")]),
        # Two branches of one turn: the turn before them counts only in the first.
        (
            [((5, 6), (7,)), ((5, 6, 7, 9), (2,)), ((5, 6, 7, 9), (3,))],
            [((7, 9, 2), "+-+", 0, 2), ((7, 9, 3), "..+")],
        ),
        # Continuing the first of two choices leaves the second unchanged and moves the first to the
        # end.
        (
            [((5, 6), (2,)), ((5, 6), (3,)), ((5, 6, 2, 9), (4,))],
            [((3,), "+"), ((2, 9, 4), "+-+", 0, 2)],
        ),
    ],
)
def test_trajectories_by_hand(completions, expected):
    assert recorded(*(completion(*c) for c in completions)) == [trajectory(*e) for e in expected]


def test_a_trajectory_has_the_oldest_version_that_made_it():
    mixed = Completion(context=PROMPT, response_ids=(2, 3), log_probs=(-0.5, -0.5), versions=(4, 3))
    (made,) = recorded(mixed, completion((5, 6, 2, 3, 9), (4,), version=6))
    assert (made.weight_version, made.versions) == (3, ((4, 1), (3, 2), (6, 1)))
    assert made.response_mask == (True, True, False, True)


@pytest.mark.parametrize(
    ("a", "b", "count"), [((), (1,), 0), ((1, 2), (2,), 1), ((1, 2), (3, 2), 1), ((1, 2), (1, 2), 2), ((1,), (2,), 0)]
)
def test_texts_end_alike(a, b, count):
    assert common_end(a, b) == common_end(b, a) == count


def test_a_context_without_the_prompt_is_refused():
    with pytest.raises(
        RolloutError, match=r"begin with the 2 tokens of the session's prompt, \[5, 6\] \.\.; got \[5, 7\]"
    ):
        recorded(completion((5, 7), (1,)))


def test_each_branch_has_the_experts_of_its_own_requests():
    """A token that a turn had already computed keeps the experts of that turn."""

    def turn(context, ids, expert):
        tokens = len(context) + len(ids) - 1
        return dataclasses.replace(completion(context, ids), routed=np.full((tokens, 1, 1), expert, np.int16))

    first, second = recorded(turn((5, 6), (7,), 0), turn((5, 6, 7, 9), (2, 2), 1), turn((5, 6, 7, 9), (3,), 2))
    assert first.routed.ravel().tolist() == [0, 0, 1, 1, 1]
    assert second.routed.ravel().tolist() == [2, 2, 2, 2]


@given(st.data())
def test_every_token_is_made_once_and_every_trajectory_ends_with_one(data):
    """An agent may continue any earlier text, cut anywhere, with any tokens appended."""
    asked, said = [], [PROMPT]
    for _ in range(data.draw(st.integers(0, 8))):
        base = data.draw(st.sampled_from(said))
        cut = base[: data.draw(st.integers(len(PROMPT), len(base)))]
        context = (*cut, *data.draw(st.lists(st.integers(0, 2), max_size=3)))
        made = tuple(data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3)))
        asked.append(completion(context, made, version=len(asked)))
        said.append((*context, *made))
    trajectories = recorded(*asked)
    assert sum(sum(t.response_mask) for t in trajectories) == sum(len(c.response_ids) for c in asked)
    assert all(
        len(t.response_mask) == len(t.log_probs) == len(t.response_ids) and t.response_mask[-1] for t in trajectories
    )
    assert all(
        (log_prob < 0) == made
        for t in trajectories
        for log_prob, made in zip(t.log_probs, t.response_mask, strict=True)
    )
    ends = [(*PROMPT, *t.response_ids) for t in trajectories]
    assert all(any(end[: len(whole)] == whole for end in ends) for whole in said[1:])
    if asked:
        assert ends[-1] == said[-1]


def test_words_that_were_said_keep_the_tokens_they_were_made_of():
    """Encoding text again may give other tokens than those the policy made.

    They would then be trained on as if the policy had made them.
    """
    recorder = Recorder(PROMPT)
    recorder.add(completion((5, 6), (7, 7)), "question: a b")
    recorder.add(completion((5, 6, 7, 7, 9), (3,)), "question: a b more c")

    def encode(text):
        return [100 + ord(c) for c in text]

    def rest(text):
        return [ord(c) for c in text]

    assert recorder.ids("question: a b more c!", encode, rest) == (5, 6, 7, 7, 9, 3, ord("!"))
    assert recorder.ids("question: a b?", encode, rest) == (5, 6, 7, 7, ord("?"))
    assert recorder.ids("qu", encode, rest) == (100 + ord("q"), 100 + ord("u"))
