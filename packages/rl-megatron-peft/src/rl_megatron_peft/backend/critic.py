"""CriticBackend over Megatron-Core: trains a value head with all weights or LoRA adapters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar, Protocol

import torch
import torch.distributed as dist

from rl_megatron_peft.backend.io.hf_export import write_model
from rl_megatron_peft.backend.learner import MegatronLearner
from rl_megatron_peft.backend.model.value_head import gather_value_head, set_value_head
from rl_megatron_peft.backend.model.weight_mapping import OwnMapping
from rl_megatron_peft.backend.train.mini_batches import MetricSums, MiniBatchCounts
from rl_megatron_peft.peft.adapter_folder import read_value_head
from rl_protocol import BatchData
from rl_protocol.torch import to_weight


class ValueLoss(Protocol):
    """The trainer's loss, passed in so that trainer and backend need not import each other."""

    def __call__(
        self, values: torch.Tensor, micro: BatchData, counts: MiniBatchCounts
    ) -> tuple[torch.Tensor, MetricSums]:
        """Compute the loss of one micro-batch of T response tokens.

        Args:
            values: float32 [T], the values before each token, with gradient.
            micro: the rows of the micro-batch with all columns.
            counts: sizes of the whole mini-batch.

        Returns:
            The share of the mini-batch's loss (shares are added up), and metrics.
        """
        ...


class MegatronCriticBackend(MegatronLearner[ValueLoss]):
    """CriticBackend over Megatron-Core. For the arguments see MegatronLearner.

    The value head is always trained, also with adapters, and first values are 0.
    """

    has_value_head: ClassVar[bool] = True

    def compute_values(self, batch: BatchData) -> BatchData:
        return self.compute_columns(batch, ["values"], lambda _, output: output.T)

    def update(self, batch: BatchData) -> dict[str, float]:
        """Make an update; metrics are named `critic/*`."""
        return self.update_local(batch, self.mini_batches(batch))

    def update_local(self, batch: BatchData, mini_batches: Sequence[Sequence[int]]) -> dict[str, float]:
        """Run this replica's part of an update; see `MegatronLearner.run_update`."""

        def loss_of(micro: BatchData, counts: MiniBatchCounts, output: torch.Tensor) -> tuple[torch.Tensor, MetricSums]:
            return self._loss(output[:, 0], micro, counts)

        found = self.run_update(batch, mini_batches, loss_of)
        return {f"critic/{name}": value for name, value in found.items() if name != "loss"}

    def load_adapter(self, path: Path) -> None:
        """Load the adapter of a PEFT folder, and its value head, if it has one.

        Raises:
            AdapterError: see `MegatronLearner.load_adapter`; or the head differs in shape.
            ConfigError: the critic has no LoRA.
        """
        head = read_value_head(path, self.shape.hidden)
        super().load_adapter(path)
        set_value_head(self.model, self.ranks, head)

    def _export(self) -> Callable[[Path], Sequence[Path]]:
        """Copy the model for transformers' AutoModelForTokenClassification, adapters merged in.

        It has one label, whose logits are the values.
        """
        headless = dataclasses.replace(self.shape, tied=True)  # has no output layer to export
        weights = OwnMapping(self.path, headless, self.ranks).weights(self.model, self._merged)
        writes = dist.get_rank() == 0
        kept = [to_weight(name, weight.cpu().clone()) for name, weight in weights if writes]
        head = gather_value_head(self.model, self.ranks, self.shape.hidden)
        kept += [to_weight(f"score.{name}", weight.cpu()) for name, weight in head.items()]
        return partial(write_model, base=self.path, weights=kept, changes=self._config_changes())

    def _config_changes(self) -> dict[str, object]:
        name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"}[self.shape.family]
        return {
            "architectures": [f"{name}ForTokenClassification"],
            "id2label": {"0": "value"},
            "label2id": {"value": 0},
            "classifier_dropout": 0.0,
        }
