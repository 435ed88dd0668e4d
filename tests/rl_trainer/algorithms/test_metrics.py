"""Masked statistics and explained variance against values computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from rl_trainer.algorithms.metrics import explained_variance, length_stats, stats


def test_masked_statistics_by_hand():
    assert stats("x", [1.0, 5.0, 100.0], np.array([True, True, False])) == {"x/mean": 3.0, "x/max": 5.0, "x/min": 1.0}
    assert stats("x", [1.0], np.array([False])) == {}


def test_clip_ratio_is_against_the_configured_maximum():
    assert length_stats([2, 4, 4], 8)["response_length/clip_ratio"] == 0.0
    assert length_stats([2, 8, 4], 8)["response_length/clip_ratio"] == pytest.approx(1 / 3)


def test_explained_variance():
    assert explained_variance(np.array([1.0, 2.0]), np.array([1.0, 2.0])) == 1.0
    assert explained_variance(np.array([0.0, 0.0]), np.array([1.0, 3.0])) == 0.0
    assert explained_variance(np.array([0.0, 1.0]), np.array([2.0, 2.0])) == 0.0
