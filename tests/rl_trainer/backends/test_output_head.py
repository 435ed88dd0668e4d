"""A policy that computes its output layer in chunks learns what one with whole logits learns."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rl_protocol.torch import from_weight
from rl_trainer import ActorConfig, LoraConfig, OptimConfig
from rl_trainer.algorithms import log_probs
from rl_trainer.backends.parallel_strategy import PlainStrategy
from rl_trainer.backends.torch_policy import PolicyOptions, TorchPolicyBackend
from rl_trainer.config.backends import TorchConfig

pytestmark = pytest.mark.numeric


class Largest(TorchDispatchMode):
    """Counts the rows of the largest tensor over the vocabulary that an operation returns."""

    def __init__(self, vocabulary):
        super().__init__()
        self.vocabulary, self.rows = vocabulary, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.ndim and x.shape[-1] == self.vocabulary:
                self.rows = max(self.rows, x.numel() // self.vocabulary)
        return out


TOKENS = 14
"""In the vocabulary of `model_path`."""
WIDTH = 32
"""Of its hidden states."""
CHUNK = 5


@pytest.fixture
def chunked(monkeypatch):
    monkeypatch.setattr(log_probs, "CHUNK_BYTES", CHUNK * TOKENS * 4)


def policy(path, dtype="float32", **how):
    config = ActorConfig(optim=OptimConfig(lr=1e-3), ppo_mini_batch_size=24, entropy_coeff=0.01, **how)
    strategy, options = PlainStrategy(TorchConfig(param_dtype=dtype)), PolicyOptions(sum_pi_squared=True)
    return TorchPolicyBackend(path, config, strategy=strategy, options=options)


@pytest.mark.parametrize("packed", [True, False])
def test_chunks_train_as_the_whole_does(packed, model_path, training_batch, request):
    whole, parts = (policy(model_path, use_remove_padding=packed) for _ in range(2))
    data = training_batch(whole, rows=24)
    metrics, columns = whole.update(data, temperature=0.8), whole.compute_log_probs(data, temperature=0.8)
    request.getfixturevalue("chunked")
    with Largest(TOKENS) as seen:
        assert parts.update(data, temperature=0.8) == pytest.approx(metrics, rel=1e-4)
        found = parts.compute_log_probs(data, temperature=0.8)
    assert seen.rows <= WIDTH < len(data.ragged("responses").values)
    for name in ("log_probs", "entropy", "sum_pi_squared"):
        ours, theirs = found.ragged(name).values, columns.ragged(name).values
        assert np.linalg.norm(ours - theirs) < 1e-4 * np.linalg.norm(theirs)


def test_chunks_of_bfloat16_copies_train_the_master_weights(model_path, training_batch, request):
    whole, parts = (policy(model_path, dtype="bfloat16") for _ in range(2))
    data = training_batch(whole, rows=24)
    metrics, before = whole.update(data, temperature=1.0), head_weight(parts)
    request.getfixturevalue("chunked")
    assert parts.update(data, temperature=1.0) == pytest.approx(metrics, rel=0.05)
    assert head_weight(parts).dtype == torch.float32
    assert (head_weight(parts) != before).any()


def head_weight(policy):
    (found,) = (from_weight(one).clone() for one in policy.named_weights() if one.name == "lm_head.weight")
    return found


def test_chunks_train_adapters_below_the_frozen_layer(model_path, training_batch, request):
    whole, parts = (TorchPolicyBackend(model_path, ActorConfig(), lora=LoraConfig(rank=2)) for _ in range(2))
    data = training_batch(whole, rows=24)
    metrics = whole.update(data, temperature=0.8)
    request.getfixturevalue("chunked")
    with Largest(TOKENS) as seen:
        assert parts.update(data, temperature=0.8) == pytest.approx(metrics, rel=1e-4)
    assert seen.rows <= WIDTH < len(data.ragged("responses").values)
