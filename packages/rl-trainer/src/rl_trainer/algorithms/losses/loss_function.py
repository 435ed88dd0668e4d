"""Interface of a policy loss: its inputs and its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from rl_protocol import BatchError
from rl_trainer.algorithms.kl import SAFE_LOG
from rl_trainer.config import ActorConfig


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """Inputs of a policy loss: T tokens of `rows` complete trajectories.

    Attributes:
        log_prob: [T] log pi of each token under the policy being trained, nats; carries the
            gradient.
        old_log_prob: [T] the same before the update.
        advantages: [T].
        mask: bool [T], true for tokens that are trained on.
        row: int64 [T], trajectory of each token.
        rows: number of trajectories.
        config: clip ranges and other settings of the losses, under `actor`.
        chosen: bool [T], for the losses that treat selected tokens differently (Clip-Cov, KL-Cov).
    """

    log_prob: torch.Tensor
    old_log_prob: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    row: torch.Tensor
    rows: int
    config: ActorConfig
    chosen: torch.Tensor | None = None

    def log_ratio(self) -> torch.Tensor:
        """[T] log r = log pi / pi_old."""
        return self.log_prob - self.old_log_prob

    def ratio(self) -> torch.Tensor:
        """[T] r = pi / pi_old; log r is clamped to +- 20."""
        return torch.exp(self.log_ratio().clamp(-SAFE_LOG, SAFE_LOG))

    def by_sign(self, positive: float, other: float) -> torch.Tensor:
        """[T] `positive` where the advantage is above 0, `other` elsewhere."""
        a = self.advantages
        return torch.where(a > 0, a.new_tensor(positive), a.new_tensor(other))

    def require_chosen(self) -> torch.Tensor:
        """`chosen`.

        Raises:
            BatchError: it is None.
        """
        if self.chosen is None:
            raise BatchError("This policy loss needs the column chosen_tokens, which the adv stage writes; got none.")
        return self.chosen


@dataclass(frozen=True, kw_only=True)
class TokenLoss:
    """The loss of each token, and metrics of it."""

    loss: torch.Tensor
    """[T]; values at masked tokens are ignored."""
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    """Name -> [T], averaged over unmasked tokens."""


LossFunction: TypeAlias = Callable[[LossInputs], TokenLoss]
