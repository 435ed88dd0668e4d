"""KL losses: values, gradients and names."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Categorical, kl_divergence

from rl_protocol import ConfigError
from rl_trainer.algorithms.losses.kl_loss import kl_loss, topk_kl
from rl_trainer.config.kl import KL_LOSSES

pytestmark = pytest.mark.numeric


@pytest.mark.parametrize("kind", [*KL_LOSSES, "kl", "mse", "low_var_kl", "low_var_kl+"])
def test_kl_loss_equals_its_formula_and_its_gradient(kind):
    d = torch.tensor([0.4, -0.7], dtype=torch.float64)
    formulas = {
        "k1": (d, torch.ones(2).double()),
        "abs": (d.abs(), d.sign()),
        "k2": (d * d / 2, d),
        "k3": (torch.exp(-d) - 1 + d, 1 - torch.exp(-d)),
    }
    stem = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.get(kind.removesuffix("+"), kind.removesuffix("+"))
    value, gradient = formulas[stem]
    log_prob = d.clone().requires_grad_()
    loss = kl_loss(log_prob, torch.zeros(2), kind)
    loss.sum().backward()
    assert torch.allclose(loss, value)
    # straight-through kinds have the gradient of k2
    assert torch.allclose(log_prob.grad, d if kind.endswith("+") else gradient)


@settings(deadline=None)
@given(seed=st.integers(0, 1000), size=st.integers(2, 8), k=st.integers(1, 8))
def test_the_divergence_from_the_most_probable_tokens(seed, size, k):
    """It is that of distributions over K tokens and one more for the rest."""
    rng = np.random.default_rng(seed)
    logits = torch.tensor(rng.normal(size=size), requires_grad=True)
    reference = torch.from_numpy(rng.normal(size=size))
    best = torch.log_softmax(reference, 0).topk(min(k, size))
    topk_kl(torch.log_softmax(logits, 0)[best.indices], best.values).backward()
    ours, logits.grad = logits.grad, None

    def joined(x):
        p = torch.softmax(x, 0)
        kept = p[best.indices]
        return Categorical(probs=torch.cat([kept, (1 - kept.sum())[None]]) if len(kept) < size else kept)

    truth = kl_divergence(joined(logits), joined(reference))
    truth.backward()
    value = topk_kl(torch.log_softmax(logits, 0)[best.indices], best.values)
    assert value.item() == pytest.approx(truth.item(), abs=1e-5)
    assert ours.tolist() == pytest.approx(logits.grad.tolist(), abs=1e-4)
    whole = kl_divergence(Categorical(logits=logits), Categorical(logits=reference))
    assert value.item() <= whole.item() + 1e-5


def test_certain_policies_have_a_finite_divergence_with_a_gradient():
    """All probability on one of the kept tokens, or on none of them."""
    for logits in ([40.0, 0.0, 0.0], [0.0, 0.0, 40.0]):
        scores = torch.tensor(logits, requires_grad=True)
        loss = topk_kl(torch.log_softmax(scores, 0)[:2], torch.log(torch.tensor([0.5, 0.5])))
        loss.backward()
        assert loss.item() > 0.5
        assert torch.isfinite(loss)
        assert torch.isfinite(scores.grad).all()


def test_unknown_divergences_are_refused_with_the_nearest():
    for kind, message in (("k9", "got 'k9'"), ("low_var", "Did you mean"), ("full", "logits of both policies")):
        with pytest.raises(ConfigError, match=message):
            kl_loss(torch.zeros(1), torch.zeros(1), kind)


def test_straight_through_gives_the_gradient_of_the_true_divergence():
    """Compare expected gradients over a whole vocabulary with the gradient of the true KL.

    The expected value and gradient of k3+ are those of the KL. The expected gradient of k1 is not.
    """
    torch.manual_seed(0)
    logits, ref = torch.randn(5, dtype=torch.float64, requires_grad=True), torch.randn(5, dtype=torch.float64)
    log_p, log_q = torch.log_softmax(logits, -1), torch.log_softmax(ref, -1)
    p = log_p.detach().exp()
    truth = (log_p.exp() * (log_p - log_q)).sum()
    (wanted,) = torch.autograd.grad(truth, logits, retain_graph=True)
    for kind, right in (("k3+", True), ("k2", True), ("k1", False)):
        sampled = (p * kl_loss(log_p, log_q, kind)).sum()
        (gradient,) = torch.autograd.grad(sampled, logits, retain_graph=True)
        assert torch.allclose(gradient, wanted) == right
    assert (p * kl_loss(log_p, log_q, "k3+")).sum().item() == pytest.approx(truth.item())
