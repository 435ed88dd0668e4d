"""Token selection of Clip-Cov and KL-Cov against values computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from rl_trainer.algorithms.covariance_tokens import clip_cov_tokens, covariance_terms, kl_cov_tokens

pytestmark = pytest.mark.numeric


def test_covariance_by_hand():
    # means 0 and -2: products 1 * 1, -1 * -1, 0
    products = covariance_terms(np.array([1.0, -1.0, 0.0]), np.array([-1.0, -3.0, -2.0]))
    assert products.tolist() == [1.0, 1.0, 0.0]
    assert products.mean() == pytest.approx(np.cov([1.0, -1.0, 0.0], [-1.0, -3.0, -2.0], ddof=0)[0, 1])


def test_kl_cov_takes_the_largest_and_clip_cov_those_within_the_bounds():
    rng = np.random.default_rng(0)
    a, log_p = rng.normal(size=1000), rng.normal(size=1000)
    products = covariance_terms(a, log_p)
    chosen = kl_cov_tokens(a, log_p, ratio=0.05)
    assert chosen.sum() == 50
    assert products[chosen].min() > products[~chosen].max()
    clipped = clip_cov_tokens(a, log_p, ratio=0.01, low=0.5, high=2.0, rng=np.random.default_rng(1))
    assert clipped.sum() == 10
    assert ((products[clipped] > 0.5) & (products[clipped] < 2.0)).all()
    again = clip_cov_tokens(a, log_p, ratio=0.01, low=0.5, high=2.0, rng=np.random.default_rng(2))
    assert (again != clipped).any()


def test_at_least_one_token_is_chosen_unless_there_is_no_candidate():
    a, log_p = np.array([1.0, -1.0, 0.0]), np.array([-1.0, -3.0, -2.0])
    rng = np.random.default_rng(0)
    assert kl_cov_tokens(a, log_p, ratio=0.0002).sum() == 1
    assert clip_cov_tokens(a, log_p, ratio=0.0002, low=0.5, high=5, rng=rng).sum() == 1
    assert clip_cov_tokens(a, log_p, ratio=0.0002, low=2, high=5, rng=rng).sum() == 0
    assert kl_cov_tokens(np.zeros(0), np.zeros(0), ratio=0.5).tolist() == []
