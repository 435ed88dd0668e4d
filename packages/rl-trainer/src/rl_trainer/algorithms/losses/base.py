"""What a policy loss is given and what it returns."""

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
    """T tokens of `rows` trajectories, which are always whole.

    Attributes:
        log_prob: [T] log pi of each token under the policy in training, nats; what the gradient goes through.
        old_log_prob: [T] the same before the update.
        advantages: [T].
        mask: bool [T], true where the token is trained on.
        row: int64 [T], trajectory of each token.
        rows: number of trajectories.
        config: clip ranges and the other settings of the losses.
        chosen: bool [T], for the losses that choose tokens.
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
        """[T] log pi / pi_old."""
        return self.log_prob - self.old_log_prob

    def ratio(self) -> torch.Tensor:
        """[T] pi / pi_old, its logarithm held within +- 20."""
        return torch.exp(self.log_ratio().clamp(-SAFE_LOG, SAFE_LOG))

    def choice(self) -> torch.Tensor:
        """`chosen`.

        Raises:
            BatchError: it is None.
        """
        if self.chosen is None:
            raise BatchError("This policy loss needs the column chosen_tokens, which the adv stage writes; got none.")
        return self.chosen


@dataclass(frozen=True, kw_only=True)
class TokenLoss:
    """The loss of each token, and what is reported of it."""

    loss: torch.Tensor
    """[T]; what it holds where masked is not looked at."""
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    """Name -> [T], averaged over unmasked tokens."""


LossFunction: TypeAlias = Callable[[LossInputs], TokenLoss]
