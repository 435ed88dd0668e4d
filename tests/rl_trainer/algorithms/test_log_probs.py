"""Log-probs, entropies and exact divergences of logits against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rl_trainer.algorithms.log_probs import full_kl, sum_pi_squared, token_log_probs

pytestmark = pytest.mark.numeric


def test_full_divergence_against_numpy_and_autograd():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(3, 6)), rng.normal(size=(3, 6))
    p, q = (np.exp(x / 0.7) / np.exp(x / 0.7).sum(-1, keepdims=True) for x in (a, b))
    logits = torch.tensor(a, dtype=torch.float32, requires_grad=True)
    kl = full_kl(logits, torch.tensor(b, dtype=torch.float32), 0.7)
    truth = (p * np.log(p / q)).sum(-1)
    assert kl.tolist() == pytest.approx(truth.tolist(), abs=1e-5)
    kl.sum().backward()
    slope = p * (np.log(p / q) - truth[:, None]) / 0.7
    assert logits.grad.numpy() == pytest.approx(slope, abs=1e-5)


def test_readings_of_logits_against_numpy():
    rng = np.random.default_rng(0)
    logits, tokens = rng.normal(size=(5, 7)), rng.integers(0, 7, 5)
    log_prob, entropy = token_log_probs(torch.tensor(logits, dtype=torch.float32), torch.tensor(tokens), 0.7)
    p = np.exp(logits / 0.7) / np.exp(logits / 0.7).sum(-1, keepdims=True)
    assert log_prob.tolist() == pytest.approx(np.log(p[np.arange(5), tokens]).tolist(), abs=1e-5)
    assert entropy.tolist() == pytest.approx((-(p * np.log(p)).sum(-1)).tolist(), abs=1e-5)
    squares = sum_pi_squared(torch.tensor(logits, dtype=torch.float32), 0.7)
    assert squares.tolist() == pytest.approx((p * p).sum(-1).tolist(), abs=1e-6)
