"""The clipped value loss against values computed by hand."""

from __future__ import annotations

import pytest
import torch

from rl_trainer.algorithms.losses.value_loss import value_loss

pytestmark = pytest.mark.numeric


def test_value_loss_by_hand():
    loss, clipped = value_loss(torch.tensor([1.0, 0.1]), torch.tensor([0.0, 0.0]), torch.tensor([1.0, 1.0]), 0.5)
    # V = 1 counts as 0.5, the bound of its clip range; V = 0.1 is within the range
    assert loss.tolist() == pytest.approx([0.5 * 0.25, 0.5 * 0.81])
    assert clipped.tolist() == [True, False]
