"""The value function under training: a Megatron-Core model with a value head, whole or with LoRA adapters, behind the CriticBackend port."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar, Protocol

import torch
import torch.distributed as dist

from rl_megatron_peft.backend.learner import MegatronLearner, MiniBatchCounts, Reported
from rl_megatron_peft.backend.mapping import OwnMapping
from rl_megatron_peft.backend.values import value_head
from rl_megatron_peft.backend.whole import write_model
from rl_protocol import BatchData
from rl_protocol.torch import to_weight


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

    def _export(self) -> Callable[[Path], Sequence[Path]]:
        """As transformers' AutoModelForTokenClassification with one label has it, whose logits are the values; with adapters merged in."""
        headless = dataclasses.replace(self.shape, tied=True)  # no output layer of its own
        weights = OwnMapping(self.path, headless, self.ranks).weights(self.model, self._merged)
        writes = dist.get_rank() == 0
        kept = [to_weight(name, weight.cpu().clone()) for name, weight in weights if writes]
        head = value_head(self.model, self.ranks, self.shape.hidden)
        kept += [to_weight(f"score.{name}", weight.cpu()) for name, weight in head.items()]
        return partial(write_model, base=self.path, weights=kept, changes=self._classifier())

    def _classifier(self) -> dict[str, object]:
        name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[self.shape.family]
        return {
            "architectures": [f"{name}ForTokenClassification"],
            "id2label": {"0": "value"},
            "label2id": {"value": 0},
            "classifier_dropout": 0.0,
        }
