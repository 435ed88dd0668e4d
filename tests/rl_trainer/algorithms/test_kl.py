"""KL estimators against values computed by hand and exact divergences; adaptive coefficient."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rl_protocol import ConfigError
from rl_trainer.algorithms.kl import adaptive_kl_coef, kl_penalty

pytestmark = pytest.mark.numeric


def test_kl_estimators_by_hand():
    lp, ref = np.log(np.array([0.5])), np.log(np.array([0.25]))
    d = math.log(2.0)
    assert kl_penalty(lp, ref, "k1")[0] == kl_penalty(lp, ref, "kl")[0] == pytest.approx(d)
    assert kl_penalty(ref, lp, "abs")[0] == pytest.approx(d)
    assert kl_penalty(lp, ref, "k2")[0] == kl_penalty(lp, ref, "mse")[0] == pytest.approx(d * d / 2)
    assert kl_penalty(lp, ref, "k3")[0] == kl_penalty(lp, ref, "low_var_kl")[0] == pytest.approx(0.5 - 1 + d)
    for kind in ("k4", "k3+", "full"):  # a reward has no gradient that + could change
        with pytest.raises(ConfigError, match=r"AlgorithmConfig\.kl_penalty must be one of k1, k2, k3, abs"):
            kl_penalty(lp, ref, kind)


def test_k1_and_k3_estimate_the_true_divergence():
    p, q = np.array([0.7, 0.2, 0.1]), np.array([0.3, 0.3, 0.4])
    truth = float((p * np.log(p / q)).sum())
    for kind in ("k1", "k3"):
        assert float((p * kl_penalty(np.log(p), np.log(q), kind)).sum()) == pytest.approx(truth)


def test_the_adaptive_coefficient_by_hand():
    move = {"target": 0.1, "horizon": 1000, "sequences": 100}
    assert adaptive_kl_coef(0.5, 0.1, **move) == 0.5
    assert adaptive_kl_coef(0.5, 0.11, **move) == pytest.approx(0.5 * (1 + 0.1 * 0.1))
    # at most 20 % per horizon
    assert adaptive_kl_coef(0.5, 9.0, **move) == pytest.approx(0.5 * 1.02)
    assert adaptive_kl_coef(0.5, 0.0, **move) == pytest.approx(0.5 * 0.98)
