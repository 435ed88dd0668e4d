"""The policy loss does not depend on the split into micro-batches and ranks."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_protocol import ConfigError, RLError
from rl_trainer.algorithms.losses import POLICY_LOSSES, PolicyLoss
from rl_trainer.algorithms.losses.aggregate import BatchCounts
from rl_trainer.algorithms.losses.loss_function import TokenLoss
from rl_trainer.algorithms.losses.policy_objective import PolicyObjective, TokenColumns
from rl_trainer.algorithms.metrics import WeightedMeans
from rl_trainer.config import ActorConfig, PolicyLossConfig, RolloutCorrectionConfig
from rl_trainer.config.actor import LOSS_AGG_MODES

pytestmark = pytest.mark.numeric

NAMES = POLICY_LOSSES.names()


class Batch:
    """Rows of tokens with every column a loss may read, in float64."""

    def __init__(self, seed, num_rows=7):
        rng = np.random.default_rng(seed)
        lengths = rng.integers(0, 6, num_rows)
        self.rows = [np.arange(a, a + n) for a, n in zip(np.cumsum(lengths) - lengths, lengths, strict=True)]
        total = int(lengths.sum())
        old = np.log(rng.uniform(0.05, 0.9, total))
        self.columns = {
            "log_prob": np.minimum(old + rng.normal(0, 0.4, total), -1e-3),
            "entropy": rng.random(total),
            "old": old,
            "adv": rng.normal(size=total),
            "ref": old + rng.normal(0, 0.2, total),
            "weights": rng.uniform(0.5, 2, total),
            "mask": rng.random(total) < 0.8,
            "chosen": rng.random(total) < 0.2,
            "interpolation": rng.random(total),
        }
        mask = self.columns["mask"]
        filled = sum(bool(mask[row].any()) for row in self.rows)
        self.counts = BatchCounts(tokens=int(mask.sum()), sequences=filled)

    def loss(self, objective, split, *, weighted=True, interpolated=False):
        """Return the summed loss, its gradient per token and the metrics.

        `split` lists the rows of each micro-batch.
        """
        total, gradient, means = 0.0, np.zeros(self.columns["old"].size), WeightedMeans()
        for part in split:
            place = np.concatenate([np.zeros(0, int), *(self.rows[i] for i in part)])
            row = np.concatenate([np.zeros(0, int), *(np.full(self.rows[i].size, k) for k, i in enumerate(part))])
            c = {name: torch.tensor(column[place]) for name, column in self.columns.items()}
            log_prob = c["log_prob"].requires_grad_()
            tokens = TokenColumns(
                old_log_prob=c["old"],
                advantages=c["adv"],
                mask=c["mask"],
                row=torch.tensor(row, dtype=torch.int64),
                rows=len(part),
                ref_log_prob=c["ref"],
                weights=c["weights"] if weighted else None,
                chosen=c["chosen"],
                interpolation=c["interpolation"] if interpolated else None,
            )
            share = objective(log_prob, c["entropy"], tokens, self.counts, means)
            share.backward()
            total += share.item()
            gradient[place] += log_prob.grad.numpy()
        return total, gradient, means.result()


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=5)
@given(
    seed=st.integers(0, 1000),
    part_of=st.lists(st.integers(0, 3), min_size=7, max_size=7),
    in_loss=st.booleans(),
    interpolated=st.booleans(),
)
def test_no_split_changes_the_result(name, mode, seed, part_of, in_loss, interpolated):
    """Shares of micro-batches add up to the loss, gradient and metrics of the whole batch.

    This holds for rejection inside the loss, and for interpolated log-probs, too.
    """
    config = ActorConfig(
        policy_loss=PolicyLossConfig(loss_mode=name),
        loss_agg_mode=mode,
        loss_scale_factor=5,
        entropy_coeff=0.01,
        use_kl_loss=True,
        kl_loss_coef=0.1,
        kl_loss_type="k3+",
    )
    correction = RolloutCorrectionConfig(
        rollout_rs=("seq_mean_k1", "token_k1"),
        rollout_rs_threshold=("1.4", "2.0"),
        rollout_is="sequence",
    )
    objective, batch = PolicyObjective(config, correction if in_loss else None), Batch(seed)
    whole = batch.loss(objective, [range(7)], interpolated=interpolated)
    split = [[i for i in range(7) if part_of[i] == number] for number in range(4)]
    parts = batch.loss(objective, split, interpolated=interpolated)
    assert parts[0] == pytest.approx(whole[0], abs=1e-9)
    assert parts[1].tolist() == pytest.approx(whole[1].tolist(), abs=1e-9)
    assert parts[2] == pytest.approx(whole[2], abs=1e-9)


def test_the_parts_of_the_loss_by_hand():
    """Two tokens of one row: weighted policy gradient, minus entropy, plus k2 to the reference."""
    config = ActorConfig(
        policy_loss=PolicyLossConfig(loss_mode="gpg"),
        entropy_coeff=0.5,
        use_kl_loss=True,
        kl_loss_coef=0.25,
        kl_loss_type="k2",
    )
    means = WeightedMeans()
    loss = PolicyObjective(config)(
        torch.tensor([-1.0, -2.0]),
        torch.tensor([0.3, 0.7]),
        TokenColumns(
            old_log_prob=torch.tensor([-1.5, -2.0]),
            advantages=torch.tensor([1.0, -1.0]),
            mask=torch.tensor([True, True]),
            row=torch.tensor([0, 0]),
            rows=1,
            ref_log_prob=torch.tensor([-2.0, -2.0]),
            weights=torch.tensor([2.0, 0.5]),
        ),
        BatchCounts(tokens=2, sequences=1),
        means,
    )
    # policy gradient 2 * 1 = 2 and 0.5 * -2 = -1; entropy 0.5 * 1.0; k2 0.5 and 0
    assert loss.item() == pytest.approx((2 - 1 - 0.5 + 0.25 * 0.5) / 2)
    assert means.result() == pytest.approx({"pg_loss": 0.5, "ppo_kl": -0.25, "entropy_loss": 0.5, "kl_loss": 0.25})


def test_a_correction_in_the_loss_weights_the_plain_policy_gradient():
    """The importance weight, current over rollout policy, is truncated at 2 and has no gradient."""
    config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode="gpg"), loss_agg_mode="token-sum")
    correction = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold="2")
    log_prob = torch.tensor([math.log(0.6), math.log(0.9)], requires_grad=True)
    loss = PolicyObjective(config, correction)(
        log_prob,
        torch.zeros(2),
        TokenColumns(
            old_log_prob=torch.tensor([math.log(0.5), math.log(0.3)]),
            advantages=torch.tensor([1.0, 1.0]),
            mask=torch.tensor([True, True]),
            row=torch.tensor([0, 0]),
            rows=1,
        ),
        BatchCounts(tokens=2, sequences=1),
        means := WeightedMeans(),
    )
    loss.backward()
    assert loss.item() == pytest.approx(-1.2 * math.log(0.6) - 2 * math.log(0.9))
    assert log_prob.grad.tolist() == pytest.approx([-1.2, -2.0])
    assert means.result()["rollout_corr/rollout_is_mean"] == pytest.approx(1.6)


def test_a_correction_in_the_loss_rejects_without_shrinking_the_denominator():
    config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode="gpg"))
    correction = RolloutCorrectionConfig(rollout_rs=("token_k2",), rollout_rs_threshold=("0.01",))
    log_prob = torch.tensor([-1.0, -1.0], requires_grad=True)
    PolicyObjective(config, correction)(
        log_prob,
        torch.zeros(2),
        TokenColumns(
            old_log_prob=torch.tensor([-1.0, -2.0]),
            advantages=torch.ones(2),
            mask=torch.tensor([True, True]),
            row=torch.tensor([0, 1]),
            rows=2,
        ),
        BatchCounts(tokens=2, sequences=2),
        means := WeightedMeans(),
    ).backward()
    assert log_prob.grad.tolist() == [-0.5, 0.0]
    assert means.result()["rollout_corr/rollout_rs_masked_fraction"] == 0.5
    assert means.result()["pg_loss"] == pytest.approx(1.0)  # mean over the tokens that are left


DECOUPLED = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold="1.5")


def interpolated_loss(behaviour, current, interpolation, correction=DECOUPLED):
    """Sum of the losses of tokens with these probabilities and advantage 1, gradient, metrics."""
    log_prob = torch.tensor(np.log(current), requires_grad=True)
    loss = PolicyObjective(ActorConfig(loss_agg_mode="token-sum"), correction)(
        log_prob,
        torch.zeros(len(current), dtype=torch.float64),
        TokenColumns(
            old_log_prob=torch.tensor(np.log(behaviour)),
            advantages=torch.ones(len(current), dtype=torch.float64),
            mask=torch.ones(len(current), dtype=torch.bool),
            row=torch.zeros(len(current), dtype=torch.int64),
            rows=1,
            interpolation=None if interpolation is None else torch.tensor(interpolation, dtype=torch.float64),
        ),
        BatchCounts(tokens=len(current), sequences=1),
        means := WeightedMeans(),
    )
    loss.backward()
    return loss.item(), log_prob.grad.tolist(), means.result()


def test_decoupled_ppo_by_hand():
    """Clipped against the interpolated policy, and weighed from there to the rollout's.

    Token 0 lies half-way between 0.5 and 0.6, at sqrt(0.3): its ratio is below the clip range of
    1.2, and with the weight it is 0.6 / 0.5. Token 1 lies half-way between 0.3 and 0.9: its ratio
    sqrt(3) is clipped at 1.2, and its weight sqrt(3) truncated at 1.5. Token 2 is of the old policy
    itself: weight 1, ratio 0.22 / 0.2.
    """
    loss, gradient, metrics = interpolated_loss([0.5, 0.3, 0.2], [0.6, 0.9, 0.22], [0.5, 0.5, 0.0])
    assert loss == pytest.approx(-(1.2 + 1.2 * 1.5 + 1.1))
    assert gradient == pytest.approx([-1.2, 0.0, -1.1])
    assert metrics["pg_clipfrac"] == pytest.approx(1 / 3)
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx((math.sqrt(1.2) + 1.5 + 1) / 3)
    assert metrics["rollout_corr/kl"] == pytest.approx(-(math.log(1.2) / 2 + math.log(3) / 2) / 3)
    assert metrics["ppo_kl"] == pytest.approx(-(math.log(1.2) / 2 + math.log(3) / 2 + math.log(1.1)) / 3)


PROBS = st.lists(st.tuples(st.floats(0.2, 0.9), st.floats(0.2, 0.9)), min_size=1, max_size=6)


@given(pairs=PROBS)
def test_the_ends_of_the_interpolation(pairs):
    """At 0 the loss is that of the rollout's log-probs; at 1 every ratio is 1."""
    behaviour, current = (list(column) for column in zip(*pairs, strict=True))
    count = len(pairs)
    start = interpolated_loss(behaviour, current, [0.0] * count)
    plain = interpolated_loss(behaviour, current, None, correction=None)
    assert start[0] == pytest.approx(plain[0], rel=1e-9)
    assert start[1] == pytest.approx(plain[1], rel=1e-9)
    assert start[2]["rollout_corr/rollout_is_mean"] == 1
    loss, gradient, _ = interpolated_loss(behaviour, current, [1.0] * count)
    weights = [min(new / old, 1.5) for old, new in pairs]
    assert loss == pytest.approx(-sum(weights), rel=1e-9)
    assert gradient == pytest.approx([-weight for weight in weights], rel=1e-9)


@pytest.mark.parametrize(
    ("function", "wrong"),
    [
        (lambda x: None, "got NoneType"),
        (lambda x: -x.log_prob, "got Tensor"),
        (lambda x: TokenLoss(loss=-x.log_prob.mean()), r"the loss has the shape \(\)"),
        (lambda x: TokenLoss(loss=-x.log_prob[:1]), r"the loss has the shape \(1,\)"),
        (lambda x: TokenLoss(loss=-x.log_prob, metrics={"m": x.ratio().mean()}), r"the metric 'm' has the shape \(\)"),
        (lambda x: TokenLoss(loss=-x.log_prob, metrics={"m": 3}), "the metric 'm' is of type int"),
        (lambda x: TokenLoss(loss=0.5), "the loss is of type float"),
    ],
)
def test_a_policy_loss_that_returns_no_number_for_each_token_is_named(monkeypatch, function, wrong):
    with pytest.raises(ConfigError, match=rf"loss_mode='mine' must return a TokenLoss, .* of the 2 tokens; {wrong}\."):
        computed_with(monkeypatch, function)


def test_a_policy_loss_that_raises_is_named_with_its_line(monkeypatch):
    with pytest.raises(
        RLError, match=r"loss_mode='mine' raised ZeroDivisionError: .* \(.*test_policy_objective\.py:\d+\)\.$"
    ):
        computed_with(monkeypatch, lambda x: 1 / 0)


def computed_with(monkeypatch, function):
    """Compute a policy loss on two tokens of a response."""
    monkeypatch.setitem(POLICY_LOSSES._built_in, "mine", PolicyLoss(function))
    objective = PolicyObjective(ActorConfig(policy_loss=PolicyLossConfig(loss_mode="mine")))
    tokens = TokenColumns(
        old_log_prob=torch.zeros(2),
        advantages=torch.ones(2),
        mask=torch.ones(2, dtype=torch.bool),
        row=torch.zeros(2, dtype=torch.int64),
        rows=1,
    )
    objective(torch.zeros(2), torch.zeros(2), tokens, BatchCounts(tokens=2, sequences=1), WeightedMeans())


def test_an_unknown_policy_loss_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"got 'gsp0'\. Did you mean 'gspo'\?"):
        PolicyObjective(ActorConfig(policy_loss=PolicyLossConfig(loss_mode="gsp0")))


PARTS = ActorConfig(
    policy_loss=PolicyLossConfig(loss_mode="gpg"), use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type="k2"
)


def test_the_weights_of_the_parts_by_hand():
    """Token 0 has policy loss and divergence, token 1 cross-entropy, token 2 a little of each."""
    log_prob = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    loss = PolicyObjective(PARTS)(
        log_prob,
        torch.zeros(3),
        TokenColumns(
            old_log_prob=torch.tensor([-1.0, -2.0, -3.0]),
            advantages=torch.tensor([2.0, 5.0, -1.0]),
            mask=torch.ones(3, dtype=torch.bool),
            row=torch.tensor([0, 1, 2]),
            rows=3,
            ref_log_prob=torch.tensor([-2.0, -9.0, -1.0]),
            rl_weights=torch.tensor([1.0, 0.0, 0.5]),
            ce_weights=torch.tensor([0.0, 1.0, 0.25]),
            ref_kl_weights=torch.tensor([1.0, 0.0, 0.1]),
        ),
        BatchCounts(tokens=3, sequences=3),
        means := WeightedMeans(),
    )
    loss.backward()
    first = 2.0 * 1 + 0.5 * 0.5  # -A log pi, and k2 = (log pi - log ref)^2 / 2
    last = 0.5 * -3.0 + 0.25 * 3 + 0.1 * 0.5 * 2.0
    assert loss.item() == pytest.approx((first + 2.0 + last) / 3)
    expected = [-2.0 + 0.5 * 1.0, -1.0, 0.5 * 1.0 - 0.25 + 0.1 * 0.5 * -2.0]
    assert log_prob.grad.tolist() == pytest.approx([g / 3 for g in expected])
    found = means.result()
    assert found["ce_loss"] == pytest.approx(2.5)  # of the two tokens that have it
    assert found["pg_loss"] == pytest.approx((2.0 - 3.0) / 2)
    assert found["kl_loss"] == pytest.approx((0.5 + 2.0) / 2)


def test_the_entropy_bonus_is_for_tokens_of_the_policy():
    """Token 1 is of an answer of the data; token 2 is of the policy in rows without policy loss."""
    entropy = torch.tensor([0.5, 4.0, 1.5], requires_grad=True)
    loss = PolicyObjective(ActorConfig(policy_loss=PolicyLossConfig(loss_mode="gpg"), entropy_coeff=0.1))(
        torch.tensor([-1.0, -2.0, -3.0]),
        entropy,
        TokenColumns(
            old_log_prob=torch.tensor([-1.0, -2.0, -3.0]),
            advantages=torch.zeros(3),
            mask=torch.ones(3, dtype=torch.bool),
            row=torch.tensor([0, 1, 2]),
            rows=3,
            rl_weights=torch.tensor([1.0, 0.0, 0.0]),
            ce_weights=torch.tensor([0.0, 1.0, 0.0]),
        ),
        BatchCounts(tokens=3, sequences=3),
        means := WeightedMeans(),
    )
    loss.backward()
    assert entropy.grad.tolist() == pytest.approx([-0.1 / 3, 0.0, -0.1 / 3])
    assert means.result()["entropy_loss"] == pytest.approx(1.0)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=5)
@given(seed=st.integers(0, 1000))
def test_a_row_of_cross_entropy_leaves_the_other_rows_as_they_are(name, mode, seed):
    """The policy loss sees only its own tokens, whatever the log-probs of an answer are."""
    config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode=name), loss_agg_mode=mode, loss_scale_factor=5)
    objective, batch = PolicyObjective(config), Batch(seed)
    rows, columns = batch.rows, batch.columns
    row = np.concatenate([np.zeros(0, int), *(np.full(places.size, i) for i, places in enumerate(rows))])
    answer = row % 2 == 0
    counts = batch.counts

    def gradient(mask, log_prob, **weights):
        log_prob = torch.tensor(log_prob, requires_grad=True)
        objective(
            log_prob,
            torch.zeros(row.size, dtype=torch.float64),
            TokenColumns(
                old_log_prob=torch.tensor(columns["old"]),
                advantages=torch.tensor(columns["adv"]),
                mask=torch.tensor(mask),
                row=torch.tensor(row),
                rows=len(rows),
                chosen=torch.tensor(columns["chosen"]),
                **{part: torch.tensor(values) for part, values in weights.items()},
            ),
            counts,
            WeightedMeans(),
        ).backward()
        return log_prob.grad.numpy()

    improbable = np.where(answer, -60.0, columns["log_prob"])
    zero = np.zeros(row.size)
    mixed = gradient(columns["mask"], improbable, rl_weights=1.0 - answer, ce_weights=1.0 * answer)
    alone = gradient(columns["mask"] & ~answer, columns["log_prob"])
    assert np.isfinite(mixed).all()
    assert mixed[~answer].tolist() == pytest.approx(alone[~answer].tolist(), rel=1e-12)
    # and the answers have the gradient of a policy gradient with advantage 1
    plain = PolicyObjective(dataclasses.replace(config, policy_loss=PolicyLossConfig(loss_mode="gpg")))
    objective, columns = plain, {**columns, "adv": zero + 1.0}
    answers = gradient(columns["mask"] & answer, improbable)
    assert mixed[answer].tolist() == pytest.approx(answers[answer].tolist(), rel=1e-12)
