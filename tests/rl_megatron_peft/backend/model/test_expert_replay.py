"""Experts that are given to Megatron's router, against their weights by hand."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("megatron.core")

GIVEN = [[3, 0], [-1, -1], [1, 2]]


@pytest.mark.parametrize("normalized", [True, False])
def test_given_experts_get_weights_and_gradients_from_the_logits(normalized):
    """Where there are none, the router chooses the most probable ones."""
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    from rl_megatron_peft.backend.model.expert_replay import RouterReplay

    logits = torch.tensor([[1.0, 2.0, 0.5, -1.0], [0.0, 3.0, 1.0, 2.0], [2.0, 0.1, 0.2, 0.3]], requires_grad=True)
    replay = RouterReplay()

    def routed(router):
        return topk_routing_with_score_function(logits, 2, use_pre_softmax=not normalized, router_replay=router)

    for mine, own in zip(routed(replay), routed(None), strict=True):
        assert mine.equal(own)
    replay.given = torch.tensor(GIVEN)
    weights, experts = routed(replay)
    expected = torch.zeros_like(logits)
    for token, ids in enumerate([[3, 0], [1, 3], [1, 2]]):
        probabilities = logits[token].exp() / logits[token].exp().sum()
        total = probabilities[ids].sum() if normalized else 1
        expected = expected.index_put((torch.tensor(token), torch.tensor(ids)), probabilities[ids] / total)
        assert experts[token].nonzero()[:, 0].tolist() == sorted(ids)
    assert weights.tolist() == [pytest.approx(row, rel=1e-5) for row in expected.tolist()]
    (got,), (want,) = (torch.autograd.grad(one.square().sum(), logits) for one in (weights, expected))
    assert (got - want).norm() < 1e-5 * want.norm()
