"""Losses against hand-computed cases, a NumPy reference, autograd, and any split into micro-batches."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_protocol import ConfigError
from rl_trainer.algorithms.losses import BatchCounts, aggregate, kl_loss, ppo_policy_loss, token_log_probs, value_loss
from rl_trainer.config import LOSS_AGG_MODES


def ppo(log_ratio, advantage):
    loss, clipped, lower = ppo_policy_loss(
        torch.tensor([log_ratio]), torch.zeros(1), torch.tensor([advantage]), clip_low=0.2, clip_high=0.28, clip_c=3.0
    )
    return loss.item(), clipped.item(), lower.item()


def test_ppo_policy_loss_by_hand():
    assert ppo(0.0, 2.0) == (-2.0, False, False)
    assert ppo(math.log(1.5), 1.0) == (pytest.approx(-1.28), True, False)  # the upper clip is 1 + 0.28
    assert ppo(math.log(1.5), -1.0) == (pytest.approx(1.5), False, False)
    assert ppo(math.log(0.5), 1.0) == (pytest.approx(-0.5), False, False)
    assert ppo(math.log(0.5), -1.0) == (pytest.approx(0.8), True, False)  # the lower clip is 1 - 0.2
    assert ppo(math.log(5.0), -1.0) == (pytest.approx(3.0), False, True)  # dual clip


def test_no_gradient_where_the_clip_decides():
    for log_ratio, advantage in ((math.log(1.5), 1.0), (math.log(0.5), -1.0), (math.log(5.0), -1.0)):
        log_prob = torch.tensor([log_ratio], requires_grad=True)
        loss, _, _ = ppo_policy_loss(
            log_prob, torch.zeros(1), torch.tensor([advantage]), clip_low=0.2, clip_high=0.28, clip_c=3.0
        )
        loss.sum().backward()
        assert log_prob.grad.item() == 0.0


def test_gradient_at_ratio_one_is_the_policy_gradient():
    log_prob = torch.tensor([0.3, -0.4], requires_grad=True)
    advantages = torch.tensor([2.0, -1.5])
    ppo_policy_loss(log_prob, log_prob.detach().clone(), advantages, clip_low=0.2, clip_high=0.2, clip_c=3.0)[
        0
    ].sum().backward()
    assert log_prob.grad.tolist() == pytest.approx([-2.0, 1.5])


def test_value_loss_by_hand():
    loss, clipped = value_loss(torch.tensor([1.0, 0.1]), torch.tensor([0.0, 0.0]), torch.tensor([1.0, 1.0]), 0.5)
    assert loss.tolist() == pytest.approx(
        [0.5 * 0.25, 0.5 * 0.81]
    )  # V moved to 1 but counts as 0.5; V = 0.1 is within reach
    assert clipped.tolist() == [True, False]


def test_kl_loss_equals_its_formula_and_its_gradient():
    d = torch.tensor([0.4, -0.7])
    for kind, value, gradient in (
        ("k1", d, torch.ones(2)),
        ("abs", d.abs(), d.sign()),
        ("k2", d * d / 2, d),
        ("k3", torch.exp(-d) - 1 + d, 1 - torch.exp(-d)),
    ):
        log_prob = d.clone().requires_grad_()
        loss = kl_loss(log_prob, torch.zeros(2), kind)
        loss.sum().backward()
        assert torch.allclose(loss, value)
        assert torch.allclose(log_prob.grad, gradient)
    with pytest.raises(ConfigError, match="k9"):
        kl_loss(d, d, "k9")


def test_token_log_probs_against_numpy():
    rng = np.random.default_rng(0)
    logits, tokens = rng.normal(size=(5, 7)), rng.integers(0, 7, 5)
    log_prob, entropy = token_log_probs(torch.tensor(logits, dtype=torch.float32), torch.tensor(tokens), 0.7)
    p = np.exp(logits / 0.7) / np.exp(logits / 0.7).sum(-1, keepdims=True)
    assert log_prob.tolist() == pytest.approx(np.log(p[np.arange(5), tokens]).tolist(), abs=1e-5)
    assert entropy.tolist() == pytest.approx((-(p * np.log(p)).sum(-1)).tolist(), abs=1e-5)


def slow_aggregate(rows, mode):
    """rows: list of lists of unmasked losses."""
    filled = [row for row in rows if row]
    tokens = [x for row in rows for x in row]
    if mode == "token-mean":
        return sum(tokens) / len(tokens) if tokens else 0.0
    if mode == "token-sum":
        return sum(tokens)
    per_row = [sum(row) / (len(row) if mode == "seq-mean-token-mean" else 1) for row in filled]
    return sum(per_row) / len(filled) if filled else 0.0


@settings(deadline=None)
@given(st.data(), st.sampled_from(LOSS_AGG_MODES))
def test_aggregation_equals_the_definition_for_any_split(data, mode):
    lengths = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=6))
    loss = [data.draw(st.lists(st.floats(-2, 2, width=32), min_size=n, max_size=n)) for n in lengths]
    mask = [data.draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in lengths]
    kept = [[x for x, m in zip(row, keep, strict=True) if m] for row, keep in zip(loss, mask, strict=True)]
    counts = BatchCounts(tokens=sum(map(len, kept)), sequences=sum(bool(row) for row in kept))
    cut = data.draw(st.integers(0, len(lengths)))
    total = 0.0
    for part in (range(cut), range(cut, len(lengths))):
        flat = torch.tensor([x for i in part for x in loss[i]], dtype=torch.float64)
        flags = torch.tensor([m for i in part for m in mask[i]], dtype=torch.bool)
        row = torch.tensor([k for k, i in enumerate(part) for _ in loss[i]], dtype=torch.int64)
        total += aggregate(flat, flags, row, len(part), counts, mode).item()
    assert total == pytest.approx(slow_aggregate(kept, mode), abs=1e-6)


def test_an_unknown_aggregation_is_refused():
    with pytest.raises(ConfigError, match="token-median"):
        aggregate(
            torch.zeros(1),
            torch.ones(1, dtype=torch.bool),
            torch.zeros(1, dtype=torch.int64),
            1,
            BatchCounts(tokens=1, sequences=1),
            "token-median",
        )


def test_masked_tokens_get_no_gradient_even_when_not_finite():
    loss = torch.tensor([1.0, float("inf")], requires_grad=True)
    mask = torch.tensor([True, False])
    aggregate(
        loss, mask, torch.zeros(2, dtype=torch.int64), 1, BatchCounts(tokens=1, sequences=1), "token-mean"
    ).backward()
    assert loss.grad.tolist() == [1.0, 0.0]
