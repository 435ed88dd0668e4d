"""On-policy distillation: its gradient is the exact one of the reverse KL divergence."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from relative import apart
from torch.distributions import Categorical, kl_divergence
from transformers import AutoModelForCausalLM

from rl_protocol import BatchData, RowKey, ragged
from rl_trainer import LoraConfig, OptimConfig
from rl_trainer.algorithms.advantages import ADVANTAGE_ESTIMATORS, AdvantageInputs
from rl_trainer.algorithms.losses.aggregate import BatchCounts
from rl_trainer.algorithms.losses.policy_objective import PolicyObjective, TokenColumns
from rl_trainer.algorithms.metrics import WeightedMeans
from rl_trainer.backends.torch_policy import PolicyOptions, TorchPolicyBackend
from rl_trainer.config import ActorConfig, PolicyLossConfig

pytestmark = pytest.mark.numeric

LOGITS = st.lists(st.floats(-3, 3), min_size=2, max_size=5)


@pytest.mark.parametrize("loss", ["vanilla", "gpg", "cispo"])
@pytest.mark.parametrize("n", [1, 2, 3])
@settings(deadline=None, max_examples=25)
@given(student=LOGITS, seed=st.integers(0, 1000))
def test_the_expected_gradient_is_that_of_the_divergence(n, loss, student, seed):
    """Over all outcomes of `n` sampled tokens, weighted by their probabilities.

    So the baseline, which is of the other sessions, does not change it.
    """
    logits = torch.tensor(student, dtype=torch.float64, requires_grad=True)
    teacher = torch.from_numpy(np.random.default_rng(seed).normal(size=len(student)))
    log_prob, of_teacher = torch.log_softmax(logits, 0), torch.log_softmax(teacher, 0)
    groups = list(product(range(len(student)), repeat=n))
    tokens = torch.tensor(groups).flatten()
    probability = log_prob.detach().exp()[torch.tensor(groups)].prod(1).repeat_interleave(n)
    old, size = log_prob.detach()[tokens], tokens.numel()
    advantages, _ = ADVANTAGE_ESTIMATORS.get("opd").estimate(
        AdvantageInputs(
            keys=[RowKey(f"p{group}", session, 0) for group in range(len(groups)) for session in range(n)],
            offsets=np.arange(size + 1),
            mask=np.ones(size, np.bool_),
            scores=np.arange(size, dtype=np.float64),  # rewards have no part in it
            old_log_probs=old.numpy(),
            ref_log_prob=of_teacher[tokens].numpy(),
        )
    )
    config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode=loss), loss_agg_mode="token-sum")
    PolicyObjective(config)(
        log_prob[tokens],
        torch.zeros(size),
        TokenColumns(
            old_log_prob=old,
            advantages=torch.from_numpy(advantages),
            mask=torch.ones(size, dtype=torch.bool),
            row=torch.arange(size),
            rows=size,
            weights=probability / n,
        ),
        BatchCounts(tokens=size, sequences=size),
        WeightedMeans(),
    ).backward()
    ours, logits.grad = logits.grad, None
    kl_divergence(Categorical(logits=logits), Categorical(logits=teacher)).backward()
    assert apart(ours, logits.grad) < 1e-9


PROMPTS, RESPONSES = [[2, 3], [4], [5, 6, 7]], [[8, 1], [9, 9, 9], [3]]
BATCH = BatchData({"prompts": ragged(PROMPTS, "int64"), "responses": ragged(RESPONSES, "int64")})
EVERY = 1000
"""More than the vocabulary has tokens."""


@pytest.fixture(scope="module")
def teacher_path(model_path, tmp_path_factory):
    """A model of another size with the same tokens."""
    config = AutoModelForCausalLM.from_pretrained(model_path).config
    config.num_hidden_layers, config.layer_types = 1, config.layer_types[:1]
    folder = tmp_path_factory.mktemp("teacher")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def responses_of(model, row):
    """Logits that predict the response of a row, [R, V]."""
    prompt, response = PROMPTS[row], RESPONSES[row]
    return model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]


@pytest.mark.parametrize("packed", [False, True])
def test_the_update_has_the_gradient_of_the_divergence_of_two_models(model_path, teacher_path, packed):
    """With all tokens of the vocabulary, and no policy loss: transformers and autograd alone."""
    options = PolicyOptions(frozen=True, top=EVERY)
    teacher = TorchPolicyBackend(teacher_path, None, options=options).compute_log_probs(BATCH, temperature=1.0)
    config = ActorConfig(
        optim=OptimConfig(lr=1e-3, grad_clip=1e9),
        ppo_mini_batch_size=3,
        ppo_micro_batch_size=2,
        use_kl_loss=True,
        kl_loss_coef=0.5,
        kl_loss_topk=EVERY,
        use_remove_padding=packed,
    )
    policy = TorchPolicyBackend(model_path, config, seed=0)
    read = {
        "response_mask": ragged([[True] * len(response) for response in RESPONSES], "bool"),
        "ref_top_log_probs": teacher["top_log_probs"],
        "ref_top_tokens": teacher["top_tokens"],
    }
    metrics = policy.update(BATCH.union(BatchData(read)), temperature=1.0)
    student, other = (AutoModelForCausalLM.from_pretrained(path) for path in (model_path, teacher_path))
    total = sum(
        kl_divergence(Categorical(logits=responses_of(student, i)), Categorical(logits=responses_of(other, i))).sum()
        for i in range(len(PROMPTS))
    )
    mean = total / sum(map(len, RESPONSES))
    (0.5 * mean).backward()
    assert metrics["actor/kl_loss"] == pytest.approx(mean.item(), rel=1e-4)
    ours = dict(policy._model.named_parameters())
    pairs = [(ours[name].grad, parameter.grad) for name, parameter in student.named_parameters()]
    error = sum(((a - b) ** 2).sum() for a, b in pairs) ** 0.5
    assert float(error) <= 1e-4 * float(sum((b**2).sum() for _, b in pairs) ** 0.5)


def test_the_most_probable_tokens_of_a_reference(model_path, teacher_path):
    """They are those of a forward pass of each row; a policy's own passes do not look for them."""
    options = PolicyOptions(frozen=True, top=3, forward_rows=2)
    found = TorchPolicyBackend(teacher_path, None, options=options).compute_log_probs(BATCH, temperature=0.7)
    model = AutoModelForCausalLM.from_pretrained(teacher_path)
    for i in range(len(PROMPTS)):
        with torch.no_grad():
            best = torch.log_softmax(responses_of(model, i) / 0.7, -1).topk(3)
        assert found.ragged("top_tokens").row(i).tolist() == best.indices.flatten().tolist()
        assert found.ragged("top_log_probs").row(i).tolist() == pytest.approx(best.values.flatten().tolist(), rel=1e-4)
    assert found["top_tokens"].dtype == "int32"
    adapted = TorchPolicyBackend(model_path, ActorConfig(), lora=LoraConfig(rank=2), options=PolicyOptions(top=3))
    assert "top_tokens" not in adapted.compute_log_probs(BATCH, temperature=1.0)
    assert "top_tokens" in adapted.compute_reference_log_probs(BATCH, temperature=1.0)
