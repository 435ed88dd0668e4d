"""Runs of weight versions, from turns that updates cut, to the tags of a row."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_protocol import RolloutError
from rl_protocol.ports import Generation, SamplingParams
from rl_protocol.testing.bigram_model import BigramEngine
from rl_trainer import PromptRow, SessionKind, Trajectory
from rl_trainer.rollout.agents.transcript import Transcript
from rl_trainer.rollout.session_turns import SessionRef, run_sessions
from rl_trainer.rollout.token_versions import joined_runs, version_runs


@given(st.lists(st.one_of(st.none(), st.integers(0, 3)), max_size=20))
def test_runs_cover_all_tokens_and_name_every_version_in_order(versions):
    runs = version_runs(versions)
    known = [version for version in versions if version is not None]
    assert sum(length for _, length in runs) == (len(versions) if known else 0)
    expanded = [version for version, length in runs for _ in range(length)]
    assert [one for one, made in zip(expanded, versions, strict=False) if made is not None] == known
    assert all(a != b for (a, _), (b, _) in pairwise(runs))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=8))
def test_joined_parts_have_the_runs_of_their_tokens(parts):
    assert joined_runs(parts) == version_runs([version for version, tokens in parts for _ in range(tokens)])


def generation(tokens, version, finish="stop"):
    return Generation(
        response_ids=tuple(tokens), log_probs=(-0.5,) * len(tokens), finish_reason=finish, weight_version=version
    )


def test_a_transcript_names_the_version_of_each_token():
    """The first turn is aborted twice by updates, once before its first token."""
    answers = [
        generation([], 1, "abort"),
        generation([7, 8], 2, "abort"),
        generation([9], 3),
        generation([5], 4),
    ]

    class Policy:
        response_length = 20
        stop = ()

        async def __call__(self, context, max_tokens=None):
            return answers.pop(0)

    async def main():
        transcript = Transcript((1, 2), Policy())
        transcript.observe([6])
        assert (await transcript.turn()).weight_version == 2
        transcript.observe([4, 4])
        await transcript.turn()
        return transcript.trajectory()

    trajectory = asyncio.run(main())
    assert trajectory.versions == ((2, 3), (3, 3), (4, 1))
    assert (trajectory.weight_version, trajectory.newest_version) == (2, 4)
    assert trajectory.response_mask == (False, True, True, True, False, False, True)


GOOD = Trajectory(
    response_ids=(3, 4), response_mask=(True, True), log_probs=(-1.0, -1.0), weight_version=2, versions=((2, 1), (3, 1))
)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"versions": ((2, 1),)}, r"'a', trajectory 0 has 2 tokens .* got \(\(2, 1\),\)"),
        ({"versions": ((3, 2),)}, "with that oldest version"),
        ({"versions": ((-1, 2),), "weight_version": -1}, "a version is at least 0"),
        ({"versions": (), "weight_version": -1}, "a version is at least 0"),
    ],
)
def test_an_unknown_version_fails_the_session(changes, words):
    def outcome(trajectory):
        async def run(row, generate):
            return [trajectory]

        refs = [SessionRef("a", 0, PromptRow(prompt_ids=(2,), data_source="d", ground_truth=""))]
        (end,) = asyncio.run(run_sessions(SessionKind(run), refs, BigramEngine(), SamplingParams(max_new_tokens=4)))
        return end

    assert outcome(GOOD) == [GOOD]
    failed = outcome(replace(GOOD, **changes))
    assert isinstance(failed, RolloutError)
    with pytest.raises(RolloutError, match=words):
        raise failed
