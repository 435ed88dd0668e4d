"""The cross-entropy of answers, against the loss and the gradient of transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_protocol import BatchData, ragged
from rl_trainer import ActorConfig, OptimConfig
from rl_trainer.backends.torch_policy import TorchPolicyBackend

pytestmark = pytest.mark.numeric

PROMPTS = [[2, 3], [4], [5, 6, 7], [2]]
ANSWERS = [[8, 1], [9, 9, 9], [3], [4, 1]]
IGNORED = -100
"""Label of a token that transformers leaves out of its loss."""


def answers(**columns):
    ones = [[1.0] * len(answer) for answer in ANSWERS]
    return BatchData(
        {
            "prompts": ragged(PROMPTS, "int64"),
            "responses": ragged(ANSWERS, "int64"),
            "response_mask": ragged([[True] * len(answer) for answer in ANSWERS], "bool"),
            "ce_weights": ragged(ones, "float32"),
            **columns,
        }
    )


def of_transformers(model, rows=(0, 1, 2, 3)):
    """The loss of `model(input_ids, labels=...)`, a mean over the tokens of the answers."""
    joined = [PROMPTS[i] + ANSWERS[i] for i in rows]
    longest = max(map(len, joined))
    return model(
        input_ids=torch.tensor([ids + [0] * (longest - len(ids)) for ids in joined]),
        attention_mask=torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in joined]),
        labels=torch.tensor(
            [
                [IGNORED] * len(PROMPTS[i]) + ANSWERS[i] + [IGNORED] * (longest - len(ids))
                for i, ids in zip(rows, joined, strict=True)
            ]
        ),
    ).loss


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("micro", [0, 1, 3])
def test_loss_and_gradient_are_those_of_transformers(model_path, micro, packed):
    """A mean over tokens, however the answers are split: not over rows, nor of micro-batches."""
    config = ActorConfig(
        optim=OptimConfig(lr=1e-3, grad_clip=1e9),
        ppo_mini_batch_size=4,
        ppo_micro_batch_size=micro,
        use_remove_padding=packed,
    )
    policy = TorchPolicyBackend(model_path, config, seed=0)
    metrics = policy.update(answers(), temperature=1.0)
    model = AutoModelForCausalLM.from_pretrained(model_path)
    loss = of_transformers(model)
    loss.backward()
    ours = dict(policy._model.named_parameters())
    assert metrics["actor/ce_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert "actor/pg_loss" not in metrics
    pairs = [(ours[name].grad, parameter.grad) for name, parameter in model.named_parameters()]
    error = sum(((a - b) ** 2).sum() for a, b in pairs) ** 0.5
    assert float(error) <= 1e-5 * float(sum((b**2).sum() for _, b in pairs) ** 0.5)


def test_answers_and_policy_gradient_add_up_in_one_loss(model_path):
    """Rows 0 and 1 are answers of weight 0.5, rows 2 and 3 responses of advantages 1 and -2."""
    config = ActorConfig(optim=OptimConfig(lr=1e-3, grad_clip=1e9), ppo_mini_batch_size=4, ppo_micro_batch_size=3)
    policy = TorchPolicyBackend(model_path, config, seed=0)
    given, advantages = [True, True, False, False], [0.0, 0.0, 1.0, -2.0]
    like = [[len(answer)] for answer in ANSWERS]
    metrics = policy.update(
        answers(
            old_log_probs=policy.compute_log_probs(answers(), temperature=1.0)["log_probs"],
            advantages=ragged([[a] * n for a, [n] in zip(advantages, like, strict=True)], "float32"),
            ce_weights=ragged([[0.5 * g] * n for g, [n] in zip(given, like, strict=True)], "float32"),
            rl_weights=ragged([[float(not g)] * n for g, [n] in zip(given, like, strict=True)], "float32"),
        ),
        temperature=1.0,
    )
    model = AutoModelForCausalLM.from_pretrained(model_path)
    lengths = [n for [n] in like]
    # at ratio 1 the gradient of the policy loss is that of -advantage * log-prob
    total = 0.5 * sum(lengths[:2]) * of_transformers(model, [0, 1])
    for row in (2, 3):
        total = total + advantages[row] * lengths[row] * of_transformers(model, [row])
    (total / sum(lengths)).backward()
    norm = sum((p.grad**2).sum() for p in model.parameters()) ** 0.5
    assert metrics["actor/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert metrics["actor/ce_loss"] == pytest.approx(of_transformers(model, [0, 1]).item(), rel=1e-5)
    assert metrics["actor/pg_loss"] == pytest.approx(-(1.0 * 1 - 2.0 * 2) / 3, rel=1e-5)
