"""Policy losses against values computed by hand, a NumPy reference and finite differences."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from relative import apart

from rl_protocol import BatchError
from rl_trainer.algorithms.losses import POLICY_LOSSES
from rl_trainer.algorithms.losses.loss_function import LossInputs
from rl_trainer.algorithms.losses.ppo import ppo_policy_loss
from rl_trainer.config import ActorConfig, PolicyLossConfig

pytestmark = pytest.mark.numeric


NAMES = POLICY_LOSSES.names()


LOW, HIGH, C, TAU_POS, TAU_NEG, COEF = 0.2, 0.28, 3.0, 1.0, 1.5, 0.1
BETA, TAU, VESPO = 0.3, 0.7, {True: (2.0, 3.0), False: (2.5, 1.5)}


CONFIG = ActorConfig(
    clip_ratio_low=LOW,
    clip_ratio_high=HIGH,
    clip_ratio_c=C,
    tau_pos=TAU_POS,
    tau_neg=TAU_NEG,
    policy_loss=PolicyLossConfig(
        ppo_kl_coef=COEF,
        dro_beta=BETA,
        kimi_tau=TAU,
        vespo_k_pos=VESPO[True][0],
        vespo_lambda_pos=VESPO[True][1],
        vespo_k_neg=VESPO[False][0],
        vespo_lambda_neg=VESPO[False][1],
    ),
)


def loss_of(name, log_prob, old, advantages, *, rows=None, mask=None, chosen=None):
    """Return the loss [T] and its gradient when summed over unmasked tokens.

    `rows` [T] holds the trajectory of each token; by default all tokens are of one.
    """
    log_prob = torch.tensor(log_prob, dtype=torch.float64, requires_grad=True)
    size = log_prob.shape[0]
    row = torch.zeros(size, dtype=torch.int64) if rows is None else torch.tensor(rows)
    keep = torch.ones(size, dtype=torch.bool) if mask is None else torch.tensor(mask)
    out = POLICY_LOSSES.get(name).load()(
        LossInputs(
            log_prob=log_prob,
            old_log_prob=torch.tensor(old, dtype=torch.float64),
            advantages=torch.tensor(advantages, dtype=torch.float64),
            mask=keep,
            row=row,
            rows=int(row.max()) + 1 if size else 0,
            config=CONFIG,
            chosen=None if chosen is None else torch.tensor(chosen),
        )
    )
    torch.where(keep, out.loss, torch.zeros_like(out.loss)).sum().backward()
    return out.loss.detach().numpy(), log_prob.grad.numpy(), {k: v.detach().numpy() for k, v in out.metrics.items()}


def ppo(log_ratio, advantage):
    loss, clipped, lower = ppo_policy_loss(
        torch.tensor([log_ratio]), torch.zeros(1), torch.tensor([advantage]), clip_low=0.2, clip_high=0.28, clip_c=3.0
    )
    return loss.item(), clipped.item(), lower.item()


def test_ppo_policy_loss_by_hand():
    assert ppo(0.0, 2.0) == (-2.0, False, False)
    assert ppo(math.log(1.5), 1.0) == (pytest.approx(-1.28), True, False)  # upper clip 1 + 0.28
    assert ppo(math.log(1.5), -1.0) == (pytest.approx(1.5), False, False)
    assert ppo(math.log(0.5), 1.0) == (pytest.approx(-0.5), False, False)
    assert ppo(math.log(0.5), -1.0) == (pytest.approx(0.8), True, False)  # lower clip 1 - 0.2
    assert ppo(math.log(5.0), -1.0) == (pytest.approx(3.0), False, True)  # dual clip


BY_HAND = [
    ("vanilla", 1.5, 1.0, -1.28, 0.0),
    ("vanilla", 5.0, -1.0, 3.0, 0.0),
    ("gpg", 1.5, 2.0, -2.0 * math.log(0.5 * 1.5), -2.0),
    # the weight is bounded, but the gradient never vanishes
    ("cispo", 1.5, 1.0, -1.28 * math.log(0.75), -1.28),
    ("cispo", 0.5, -1.0, 0.8 * math.log(0.25), 0.8),
    # 4 * sigmoid(0) = 2; at ratio 1 the gradient is the policy gradient
    ("sapo", 1.0, 1.0, -2.0, -1.0),
    ("sapo", 1.0, -1.0, 4 / TAU_NEG / 2, 1.0),
    ("gspo", 1.5, 1.0, -1.28, 0.0),
    ("gspo", 1.1, 1.0, -1.1, -1.1),
    ("geo_mean", 1.1, 1.0, -1.1, -1.1),
    ("geo_mean", 1.5, 1.0, -math.exp(0.28), 0.0),
    ("dppo_tv", 1.5, 1.0, -1.5 * math.log(0.75), -1.5),  # pi moved by 0.25 <= 0.28
    ("dppo_tv", 1.6, 1.0, 0.0, 0.0),  # pi moved by 0.3
    ("dppo_tv", 0.5, -1.0, 0.0, 0.0),  # pi moved by -0.25 < -0.2
    # pi moved away from pi_old, and this update brings it back
    ("dppo_tv", 1.6, -1.0, 1.6 * math.log(0.8), 1.6),
    ("dppo_kl", 1.6, 1.0, -1.6 * math.log(0.8), -1.6),  # binary KL of 0.5 from 0.8: 0.223 <= 0.28
    ("dppo_kl", 1.9, 1.0, 0.0, 0.0),  # binary KL of 0.5 from 0.95: 0.830
    ("dro", 2.0, 1.0, 0.15 * math.log(2) ** 2, -1.0 + 0.3 * math.log(2)),  # log pi is 0
    ("kimi_k15", 2.0, -1.0, 0.35 * math.log(2) ** 2, 1.0 + 0.7 * math.log(2)),
    ("topr", 1.5, 2.0, -2.0 * math.log(0.75), -2.0),  # no weight where the advantage is positive
    ("topr", 1.5, -2.0, 2.0 * math.log(0.75), 2.0),  # at most 1 where it is negative
    ("topr", 0.5, -2.0, math.log(0.25), 1.0),
    ("luspo", 1.5, 1.0, -1.28, 0.0),  # as GSPO for a response of one token
    ("luspo", 1.1, 1.0, -1.1, -1.1),
    # 1.5^2 exp(3 * -0.5), 1.5^2.5 exp(1.5 * -0.5)
    ("vespo", 1.5, 1.0, -2.25 * math.exp(-1.5) * math.log(0.75), -2.25 * math.exp(-1.5)),
    ("vespo", 1.5, -1.0, 1.5**2.5 * math.exp(-0.75) * math.log(0.75), 1.5**2.5 * math.exp(-0.75)),
]


"""(loss, ratio, advantage, value, gradient) for one token with pi_old = 0.5."""


@pytest.mark.parametrize(("name", "ratio", "advantage", "loss", "gradient"), BY_HAND)
def test_policy_losses_by_hand(name, ratio, advantage, loss, gradient):
    value, grad, _ = loss_of(name, [math.log(0.5 * ratio)], [math.log(0.5)], [advantage])
    assert (value[0], grad[0]) == (pytest.approx(loss), pytest.approx(gradient))


def test_every_loss_has_a_case_by_hand():
    """Losses that select tokens have a separate case below."""
    assert {case[0] for case in BY_HAND} | {name for name in NAMES if POLICY_LOSSES.get(name).chooses} == set(NAMES)


def test_chosen_tokens_lose_their_gradient_or_pay():
    args = ([math.log(0.55)] * 2, [math.log(0.5)] * 2, [1.0, 1.0])
    value, grad, metrics = loss_of("clip_cov", *args, chosen=[True, False])
    assert value.tolist() == pytest.approx([0.0, -1.1])
    assert grad.tolist() == pytest.approx([0.0, -1.1])
    assert metrics["pg_clipfrac"].tolist() == [True, False]
    value, grad, _ = loss_of("kl_cov", *args, chosen=[True, False])
    assert value.tolist() == pytest.approx([-1.1 + COEF * math.log(1.1), -1.1])
    assert grad.tolist() == pytest.approx([-1.1 + COEF, -1.1])
    with pytest.raises(BatchError, match="chosen_tokens"):
        loss_of("kl_cov", *args)


def test_the_sequence_losses_look_at_whole_rows_and_unmasked_tokens():
    # Row 0 has log-ratios 0.2 and 9 (masked); row 1 has 0.1 and 0.3, mean 0.2.
    log_prob, old, rows = [0.2, 9.0, 0.1, 0.3], [0.0] * 4, [0, 0, 1, 1]
    mask, kept = [True, False, True, True], [0, 2, 3]
    gspo, grad, _ = loss_of("gspo", log_prob, old, [1.0] * 4, rows=rows, mask=mask)
    assert gspo[kept].tolist() == pytest.approx([-math.exp(0.2)] * 3)
    assert grad.tolist() == pytest.approx([-math.exp(0.2), 0.0, -math.exp(0.2), -math.exp(0.2)])
    gmpo, grad, _ = loss_of("geo_mean", log_prob, old, [1.0] * 4, rows=rows, mask=mask)
    mean = (0.1 + 0.28) / 2  # 0.3 is clipped to 0.28, so its token has no gradient
    assert gmpo[kept].tolist() == pytest.approx([-math.exp(0.2), -math.exp(mean), -math.exp(mean)])
    assert grad.tolist() == pytest.approx([-math.exp(0.2), 0.0, -math.exp(mean), 0.0])


def reference(name, log_prob, old, adv, rows, mask, chosen):
    """Return the loss [T] and d sum(unmasked loss) / d log_prob [T], written out in float64."""
    r = np.exp(log_prob - old)
    count = np.bincount(rows, weights=mask)
    mean = lambda x: (np.bincount(rows, weights=np.where(mask, x, 0)) / np.maximum(count, 1))[rows]  # noqa: E731
    inside = (r > 1 - LOW) & (r < 1 + HIGH)
    bounded = np.clip(r, 1 - LOW, 1 + HIGH)
    surrogate, follows = np.maximum(-adv * r, -adv * bounded), inside | (-adv * r > -adv * bounded)
    if name == "vanilla":
        dual = (adv < 0) & (surrogate > -adv * C)
        return np.where(dual, -adv * C, surrogate), np.where(follows & ~dual, -adv * r, 0)
    if name == "clip_cov":
        return np.where(chosen, 0, surrogate), np.where(follows & ~chosen, -adv * r, 0)
    if name == "kl_cov":
        price = np.where(chosen, COEF, 0)
        return -adv * r + price * np.abs(log_prob - old), -adv * r + price * np.sign(log_prob - old)
    if name == "gpg":
        return -adv * log_prob, -adv
    if name == "cispo":
        return -bounded * adv * log_prob, -bounded * adv
    if name == "sapo":
        tau = np.where(adv > 0, TAU_POS, TAU_NEG)
        gate = 1 / (1 + np.exp(-tau * (r - 1)))
        return -adv * 4 / tau * gate, -adv * 4 * gate * (1 - gate) * r
    if name == "gspo":
        s = np.exp(mean(log_prob - old))
        clipped = np.clip(s, 1 - LOW, 1 + HIGH)
        return np.maximum(-adv * s, -adv * clipped), np.where((clipped == s) | (-adv * s > -adv * clipped), -adv * s, 0)
    if name == "geo_mean":
        d = log_prob - old
        limited = np.where(adv > 0, np.minimum(d, HIGH), np.maximum(d, -LOW))
        loss = -mean(adv) * np.exp(mean(limited))
        return loss, np.where(limited == d, loss, 0)
    d, total = log_prob - old, lambda x: mean(x) * count[rows]
    if name == "dro":
        return -adv * log_prob + BETA / 2 * d**2, -adv + BETA * d
    if name == "kimi_k15":  # each of a response's tokens carries its loss
        return -total(adv * log_prob) + TAU / 2 * total(d) ** 2, count[rows] * (-adv + TAU * total(d))
    if name == "topr":
        taper = np.where(adv < 0, np.minimum(np.exp(total(d)), 1), 1)
        return -taper * adv * log_prob, -taper * adv
    if name == "luspo":
        loss, slope = reference("gspo", log_prob, old, adv, rows, mask, chosen)
        return loss * count[rows], slope * count[rows]
    if name == "vespo":
        w, power, decay = np.exp(total(d)), *(np.where(adv >= 0, VESPO[True][i], VESPO[False][i]) for i in (0, 1))
        return -(w**power) * np.exp(decay - decay * w) * adv * log_prob, -(w**power) * np.exp(decay - decay * w) * adv
    p, q = np.exp(old), np.exp(log_prob)
    if name == "dppo_tv":
        ok = np.where(adv > 0, q - p <= HIGH, q - p >= -LOW)
    else:
        kl = p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))
        ok = np.where(adv > 0, (kl <= HIGH) | (q <= p), (kl <= LOW) | (q >= p))
    weight = np.where(ok, np.minimum(r, C), 0)
    return -weight * adv * log_prob, -weight * adv


def random_tokens(seed, size=40, num_rows=6):
    rng = np.random.default_rng(seed)
    rows = np.sort(rng.integers(0, num_rows, size))
    rows = np.unique(rows, return_inverse=True)[1]
    old = np.log(rng.uniform(0.02, 0.95, size))
    log_prob = np.minimum(old + rng.normal(0, 0.5, size), -1e-3)
    adv = rng.normal(size=int(rows.max()) + 1)[rows]  # GMPO's formula assumes one sign per row
    return log_prob, old, adv, rows, rng.random(size) < 0.8, rng.random(size) < 0.3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(20))
def test_values_and_gradients_equal_the_numpy_reference(name, seed):
    log_prob, old, adv, rows, mask, chosen = random_tokens(seed)
    loss, grad, _ = loss_of(name, log_prob, old, adv, rows=rows, mask=mask, chosen=chosen)
    expected, slope = reference(name, log_prob, old, adv, rows, mask, chosen)
    assert apart(loss[mask], expected[mask]) < 1e-12
    assert apart(grad, np.where(mask, slope, 0)) < 1e-12


def objective_to_differentiate(name, log_prob, old, adv, rows, mask, chosen):
    """Return the scalar function whose derivative the paper means, for finite differences.

    Factors behind a stop-gradient are evaluated at `log_prob`.
    """
    slope = reference(name, log_prob, old, adv, rows, mask, chosen)[1]

    def value(x):
        frozen = name in ("cispo", "dppo_tv", "dppo_kl", "topr", "vespo")
        loss = slope * x if frozen else reference(name, x, old, adv, rows, mask, chosen)[0]
        return loss[mask].sum()

    return value


@pytest.mark.parametrize("name", NAMES)
def test_gradients_equal_finite_differences(name):
    log_prob, old, adv, rows, mask, chosen = random_tokens(7, size=24)
    _, grad, _ = loss_of(name, log_prob, old, adv, rows=rows, mask=mask, chosen=chosen)
    value, step = objective_to_differentiate(name, log_prob, old, adv, rows, mask, chosen), 1e-6
    slopes = [(value(log_prob + nudge) - value(log_prob - nudge)) / (2 * step) for nudge in step * np.eye(24)]
    assert apart(grad, slopes) < 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_the_first_step_follows_the_policy_gradient(name):
    """At ratio 1, every loss has the gradient of -A log pi.

    Two are losses of whole responses that grow with their length.
    """
    _, old, adv, rows, mask, _ = random_tokens(3)
    _, grad, _ = loss_of(name, old, old, adv, rows=rows, mask=mask, chosen=np.zeros(old.size, bool))
    scale = np.bincount(rows, weights=mask)[rows] if name in ("kimi_k15", "luspo") else 1.0
    assert apart(grad, np.where(mask, -adv * scale, 0)) < 1e-12


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_the_weight_of_vespo_is_largest_at_the_ratio_k_by_lambda(advantage):
    ratios = np.linspace(0.05, 4.0, 400)
    weights = [
        loss_of("vespo", [math.log(0.2 * r)], [math.log(0.2)], [advantage])[2]["vespo_weight"][0] for r in ratios
    ]
    power, decay = VESPO[advantage > 0]
    assert ratios[int(np.argmax(weights))] == pytest.approx(power / decay, abs=0.01)


@pytest.mark.parametrize("seed", range(5))
def test_topr_never_weighs_a_response_more_than_the_policy_gradient_does(seed):
    log_prob, old, adv, rows, mask, _ = random_tokens(seed)
    _, grad, _ = loss_of("topr", log_prob, old, adv, rows=rows, mask=mask)
    assert (np.abs(grad) <= np.where(mask, np.abs(adv), 0) + 1e-12).all()
    assert grad[mask & (adv > 0)].tolist() == (-adv[mask & (adv > 0)]).tolist()


def test_luspo_aggregated_by_token_means_is_gspo_aggregated_by_token_sums():
    log_prob, old, adv, rows, mask, _ = random_tokens(4)
    by_length, _, _ = loss_of("luspo", log_prob, old, adv, rows=rows, mask=mask)
    plain, _, _ = loss_of("gspo", log_prob, old, adv, rows=rows, mask=mask)
    for row in range(int(rows.max()) + 1):
        own = mask & (rows == row)
        if own.any():
            assert by_length[own].mean() == pytest.approx(plain[own].sum())


def test_dro_is_least_where_the_log_ratio_is_the_advantage_by_beta():
    _, grad, _ = loss_of("dro", [-1.0 + 0.6 / BETA, -1.0], [-1.0, -1.0], [0.6, 0.0])
    assert grad.tolist() == pytest.approx([0.0, 0.0], abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_rows_changes_a_token_by_rounding_alone(name, seed):
    """The result of a token may differ in its last bits only.

    Torch processes the end of an array with other instructions than the rest, and on some
    processors their results differ in the last bit.
    """
    log_prob, old, adv, rows, mask, chosen = random_tokens(seed)
    order = np.random.default_rng(seed).permutation(rows.max() + 1)
    place = np.concatenate([np.flatnonzero(rows == row) for row in order])
    renamed = np.argsort(order)[rows[place]]
    loss, grad, _ = loss_of(name, log_prob, old, adv, rows=rows, mask=mask, chosen=chosen)
    moved, moved_grad, _ = loss_of(
        name, log_prob[place], old[place], adv[place], rows=renamed, mask=mask[place], chosen=chosen[place]
    )
    assert apart(loss[place], moved) < 1e-13
    assert apart(grad[place], moved_grad) < 1e-13


@pytest.mark.parametrize("name", NAMES)
def test_extreme_ratios_stay_finite(name):
    loss, grad, _ = loss_of(name, [-1e-9, -60.0], [-60.0, -1e-9], [1.0, -1.0], rows=[0, 1], chosen=[True, True])
    assert np.isfinite(loss).all()
    assert np.isfinite(grad).all()
