"""The weights of a policy, to compare two ways of training it."""

from __future__ import annotations

from typing import Any

import torch

from rl_protocol.torch import from_weight


def weights_of(policy: Any) -> torch.Tensor:
    """All weights in one vector, without the bias of k_proj.

    That bias changes no output: its gradient is rounding, which Adam turns into whole steps.
    """
    sent = [weight for weight in policy.named_weights() if not weight.name.endswith("k_proj.bias")]
    return torch.cat([from_weight(weight).flatten().clone() for weight in sent])
