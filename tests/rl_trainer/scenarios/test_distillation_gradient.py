"""On-policy distillation against the exact gradient of the reverse KL divergence."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import Categorical, kl_divergence

from rl_protocol import RowKey
from rl_trainer.algorithms.advantages import ADVANTAGE_ESTIMATORS, AdvantageInputs
from rl_trainer.algorithms.losses.aggregate import BatchCounts
from rl_trainer.algorithms.losses.policy_objective import PolicyObjective, TokenColumns
from rl_trainer.algorithms.metrics import WeightedMeans
from rl_trainer.config import ActorConfig, PolicyLossConfig

pytestmark = pytest.mark.numeric

LOGITS = st.lists(st.floats(-3, 3), min_size=2, max_size=7)


@pytest.mark.parametrize("loss", ["vanilla", "gpg", "cispo"])
@given(student=LOGITS, seed=st.integers(0, 1000))
def test_the_expected_gradient_is_that_of_the_divergence(loss, student, seed):
    """Every token of the vocabulary is one response, weighted by its probability."""
    logits = torch.tensor(student, dtype=torch.float64, requires_grad=True)
    teacher = torch.from_numpy(np.random.default_rng(seed).normal(size=len(student)))
    log_prob, of_teacher = torch.log_softmax(logits, 0), torch.log_softmax(teacher, 0)
    size, old = len(student), log_prob.detach()
    advantages, returns = ADVANTAGE_ESTIMATORS.get("opd").estimate(
        AdvantageInputs(
            keys=[RowKey(f"p{token}", 0, 0) for token in range(size)],
            offsets=np.arange(size + 1),
            mask=np.ones(size, np.bool_),
            scores=np.arange(size, dtype=np.float64),  # rewards have no part in it
            old_log_probs=old.numpy(),
            ref_log_prob=of_teacher.numpy(),
        )
    )
    assert advantages.tolist() == returns.tolist()
    config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode=loss), loss_agg_mode="token-sum")
    PolicyObjective(config)(
        log_prob,
        torch.zeros(size),
        TokenColumns(
            old_log_prob=old,
            advantages=torch.from_numpy(advantages),
            mask=torch.ones(size, dtype=torch.bool),
            row=torch.arange(size),
            rows=size,
            weights=old.exp(),
        ),
        BatchCounts(tokens=size, sequences=size),
        WeightedMeans(),
    ).backward()
    ours, logits.grad = logits.grad, None
    kl_divergence(Categorical(logits=logits), Categorical(logits=teacher)).backward()
    assert ours.tolist() == pytest.approx(logits.grad.tolist(), abs=1e-9)
