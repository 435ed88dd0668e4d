"""The value function under training: a Megatron-Core model with a value head, whole or with LoRA adapters, behind the CriticBackend port."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

import torch

from rl_megatron_peft.backend.learner import MegatronLearner, MiniBatchCounts, Reported
from rl_protocol import BatchData


class ValueLoss(Protocol):
    """The loss of the trainer; see `rl_megatron_peft.backend.policy.PolicyLoss`."""

    def __call__(
        self, values: torch.Tensor, micro: BatchData, counts: MiniBatchCounts
    ) -> tuple[torch.Tensor, Reported]:
        """Of one micro-batch of T response tokens.

        Args:
            values: float32 [T] with gradient, before each token is taken.
            micro: its rows, all columns.
            counts: of the whole mini-batch.

        Returns:
            Its share of the mini-batch's loss (shares are summed), and what is reported.
        """
        ...


class MegatronCriticBackend(MegatronLearner[ValueLoss]):
    """CriticBackend over Megatron-Core; see MegatronLearner. The head is trained with adapters as well, and begins with values of 0."""

    values: ClassVar[bool] = True

    def compute_values(self, batch: BatchData) -> BatchData:
        """See rl_protocol.ports.CriticBackend.compute_values."""
        return self.compute(batch, ["values"], lambda _, out: out.T)

    def update(self, batch: BatchData) -> dict[str, float]:
        """See rl_protocol.ports.CriticBackend.update; metrics are named critic/*."""
        return self.update_share(batch, self.scheduled(batch))

    def update_share(self, batch: BatchData, mini_batches: Sequence[Sequence[int]]) -> dict[str, float]:
        """This replica's part of an update; see MegatronLearner.optimise."""

        def share(micro: BatchData, counts: MiniBatchCounts, out: torch.Tensor) -> tuple[torch.Tensor, Reported]:
            return self._loss(out[:, 0], micro, counts)

        found = self.optimise(batch, mini_batches, share)
        return {f"critic/{name}": value for name, value in found.items() if name != "loss"}
