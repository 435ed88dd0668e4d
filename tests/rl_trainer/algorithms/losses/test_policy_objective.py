"""The policy loss does not depend on the split into micro-batches and ranks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_protocol import ConfigError
from rl_trainer.algorithms.losses import POLICY_LOSSES
from rl_trainer.algorithms.losses.aggregate import BatchCounts
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
        }
        mask = self.columns["mask"]
        filled = sum(bool(mask[row].any()) for row in self.rows)
        self.counts = BatchCounts(tokens=int(mask.sum()), sequences=filled)

    def loss(self, objective, split, *, weighted=True):
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
            )
            share = objective(log_prob, c["entropy"], tokens, self.counts, means)
            share.backward()
            total += share.item()
            gradient[place] += log_prob.grad.numpy()
        return total, gradient, means.result()


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=5)
@given(seed=st.integers(0, 1000), part_of=st.lists(st.integers(0, 3), min_size=7, max_size=7), in_loss=st.booleans())
def test_no_split_changes_the_result(name, mode, seed, part_of, in_loss):
    """Shares of micro-batches add up to the loss, gradient and metrics of the whole batch.

    This holds for rejection inside the loss, too.
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
    whole = batch.loss(objective, [range(7)])
    parts = batch.loss(objective, [[i for i in range(7) if part_of[i] == number] for number in range(4)])
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


def test_an_unknown_policy_loss_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"got 'gsp0'\. Did you mean 'gspo'\?"):
        PolicyObjective(ActorConfig(policy_loss=PolicyLossConfig(loss_mode="gsp0")))
