"""Stop strings in a run of the app."""

from __future__ import annotations

import json

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def samples(done, step):
    return [json.loads(line) for line in (done.folder / "samples" / f"{step}.jsonl").read_text().splitlines()]


def test_a_response_ends_with_the_token_that_completes_a_stop_string(app):
    done = app("rollout.stop=['1','7']", "trainer.total_training_steps=1", "trainer.test_freq=0")
    assert done.code == 0, done.err
    responses = [one["response"] for one in samples(done, 1)]
    assert any(one.endswith(("1", "7")) for one in responses)
    assert not any("1" in one[:-1] or "7" in one[:-1] for one in responses)
    assert done.metrics[-1]["training/rollout_log_probs_diff_max"] < 1e-4


def test_an_empty_stop_string_is_refused(app):
    done = app("rollout.stop=['1','']")
    assert done.code == 2
    assert "rollout.stop must be without empty strings; got ('1', '')" in done.err
