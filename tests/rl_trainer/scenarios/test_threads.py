"""An update with all threads and with one ends with equal parameters."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rl_protocol import BatchData, ragged
from rl_protocol.torch import from_weight
from rl_trainer import ActorConfig, OptimConfig
from rl_trainer.backends.torch_policy import TorchPolicyBackend

pytestmark = [pytest.mark.numeric, pytest.mark.slow]
ROWS = 512
SEVERAL = 4
"""Threads. With fewer cores they take turns, and share the work in the same way."""


def recorded():
    """A batch as large as the demo's, so that operations are divided among threads."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 5, ROWS)

    def tokens(counts):
        return ragged([rng.integers(2, 12, count) for count in counts], "int64")

    def numbers(mean, spread):
        return ragged([rng.normal(mean, spread, length) for length in lengths], "float32")

    return BatchData(
        {
            "prompts": tokens(rng.integers(5, 7, ROWS)),
            "responses": tokens(lengths),
            "response_mask": ragged([[True] * length for length in lengths], "bool"),
            "old_log_probs": numbers(-1.0, 0.3),
            "ref_log_prob": numbers(-1.0, 0.3),
            "advantages": numbers(0.0, 1.0),
        }
    )


def parameters(policy):
    """All but the keys' biases.

    Their gradient is 0 up to rounding, and Adam's first step is lr * sign(gradient).
    """
    weights = [weight for weight in policy.named_weights() if not weight.name.endswith("k_proj.bias")]
    return torch.cat([from_weight(weight).flatten().double() for weight in weights])


def test_an_update_with_all_threads_equals_that_with_one(base_model):
    config = ActorConfig(ppo_mini_batch_size=128, use_kl_loss=True, optim=OptimConfig(lr=1e-6))
    found = []
    batch, initial = recorded(), parameters(TorchPolicyBackend(base_model, None))
    for threads in (1, SEVERAL):
        torch.set_num_threads(threads)
        policy = TorchPolicyBackend(base_model, config)
        policy.update(batch, temperature=1.0)
        found.append(parameters(policy))
    one, several = found
    norm = torch.linalg.vector_norm
    assert norm(one - initial) > 1e-5 * norm(initial), "the update changed nothing"
    assert norm(several - one) <= 1e-6 * norm(one)
