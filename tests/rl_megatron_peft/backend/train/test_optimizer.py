"""Replicas that share the optimizer state learn the same; each holds only its part.

test_layouts_agree.py and test_critic.py cover other layouts.
"""

from __future__ import annotations

import numpy as np
import pytest

# The tests read what processes in several layouts have written, as test_critic.py and
# test_layouts_agree.py do. The timeout starts this file long before them: no worker of pytest waits
# for another one to write it.
pytestmark = pytest.mark.timeout(1000)


@pytest.mark.parametrize(
    ("fixture", "family"),
    [
        pytest.param("runs", "qwen2", marks=pytest.mark.slow),
        pytest.param("runs", "even", marks=pytest.mark.slow),
        pytest.param("more_runs", "qwen3", marks=pytest.mark.nightly),
    ],
)
def test_ten_steps_of_two_replicas_are_bit_equal_whether_they_share_it_or_not(request, fixture, family):
    """Compares losses and gradient norms before clipping."""
    folder = request.getfixturevalue(fixture)
    each, shared = (np.load(folder / layout / f"curve-{family}.npz") for layout in ("dp2", "zero2"))
    assert np.ptp(each["actor/grad_norm"]) > 0.1
    for name in each.files:
        assert np.array_equal(each[name], shared[name]), name


@pytest.fixture
def found(request):
    def load(layout):
        runs = request.getfixturevalue("runs" if layout == "zero2" else "more_runs")
        return np.load(runs / layout / "shared-state.npz")

    return load


IN_CI = pytest.param("zero2", marks=pytest.mark.slow)
NIGHTLY = [pytest.param(layout, marks=pytest.mark.nightly) for layout in ("zero2tp2", "zero2pp2", "zero4")]


@pytest.mark.parametrize("layout", [IN_CI, NIGHTLY[0]])
def test_each_of_two_replicas_has_about_half(found, layout):
    """In bfloat16 the state includes float32 copies of all weights. No parameter is split."""
    each, shared = found(layout)["bfloat16-bytes"]
    assert len(set(each)) == 1
    assert np.abs(shared / each - 0.5).max() < 0.03
    parts = shared.reshape(2, -1)  # ranks of the same layer are adjacent
    assert (parts.sum(0) == each[0]).all()


@pytest.mark.nightly
@pytest.mark.parametrize(("layout", "shares"), [("zero2pp2", [0, 0, 1, 1]), ("zero4", [1, 1, 0, 0])])
def test_a_replica_that_has_none_and_a_stage_that_trains_nothing_go_along(found, layout, shares):
    """Two factors are trained: by one stage with two replicas, or by four replicas."""
    each, shared = found(layout)["few-bytes"]
    assert ((shared > 0) == shares).all()
    assert shared.sum() * (2 if layout == "zero2pp2" else 4) == each.sum()


@pytest.mark.parametrize("layout", [IN_CI, *NIGHTLY])
def test_replicas_that_do_not_share_it_resume_from_those_that_do(found, layout):
    """Covers both kinds of checkpoint. Two replicas are bit-equal; four sum in another order."""
    numbers = found(layout)
    names = [name for name in numbers.files if not name.endswith("bytes")]
    assert len(names) == (2 if layout == "zero2pp2" else 4)
    for name in names:
        largest = 0 if layout != "zero4" else 1e-5 if name.startswith("few") else 2**-7
        assert numbers[name] <= largest, name
