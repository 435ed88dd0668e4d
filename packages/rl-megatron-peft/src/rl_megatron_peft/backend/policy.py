"""PolicyBackend over Megatron-Core: trains all weights or LoRA adapters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from rl_megatron_peft.backend.io.hf_export import write_model
from rl_megatron_peft.backend.learner import MegatronLearner
from rl_megatron_peft.backend.lora.attach import adapters_off
from rl_megatron_peft.backend.lora.gather_adapter import gather_adapter
from rl_megatron_peft.backend.train.forward_backward import log_probs
from rl_megatron_peft.backend.train.mini_batches import MetricSums, MiniBatchCounts
from rl_megatron_peft.peft.adapter_folder import Adapter, peft_tensors, write_adapter_files
from rl_protocol import BatchData, WeightTensor
from rl_protocol.kept_tokens import KeptTokens
from rl_protocol.ports import WeightCapabilities
from rl_protocol.torch import to_weight


class PolicyLoss(Protocol):
    """The trainer's loss, passed in so that trainer and backend need not import each other."""

    def __call__(
        self, log_prob: torch.Tensor, entropy: torch.Tensor, micro: BatchData, counts: MiniBatchCounts
    ) -> tuple[torch.Tensor, MetricSums]:
        """Compute the loss of one micro-batch of T response tokens.

        Args:
            log_prob: log-probabilities [T], with gradient.
            entropy: entropies [T] in nats, with gradient.
            micro: the rows of the micro-batch with all columns.
            counts: sizes of the whole mini-batch.

        Returns:
            The share of the mini-batch's loss (shares are added up), and metrics.
        """
        ...


class MegatronPolicyBackend(MegatronLearner[PolicyLoss]):
    """PolicyBackend over Megatron-Core. For the arguments see MegatronLearner."""

    capabilities = WeightCapabilities()

    def compute_log_probs(self, batch: BatchData, *, temperature: float) -> BatchData:
        return self._compute(batch, temperature, experts=self.settings.records_experts)

    def _compute(self, batch: BatchData, temperature: float, *, experts: bool) -> BatchData:
        def read_columns(micro: BatchData, logits: torch.Tensor) -> torch.Tensor:
            return torch.stack(self._log_probs(logits, micro, temperature))

        return self.compute_columns(batch, ["log_probs", "entropy"], read_columns, experts=experts)

    def compute_reference_log_probs(self, batch: BatchData, *, temperature: float) -> BatchData:
        """Compute `log_probs` and `entropy` of the base model: this model with its adapters off.

        Raises:
            ConfigError: the policy has no LoRA, so its first weights are gone.
        """
        self._require_lora()
        with adapters_off(self.adapters):
            return self._compute(batch, temperature, experts=False)

    def update(self, batch: BatchData, *, temperature: float) -> dict[str, float]:
        """Make an update; metrics are named `actor/*` unless their name contains a slash."""
        return self.update_local(batch, self.mini_batches(batch), temperature=temperature)

    def update_local(
        self, batch: BatchData, mini_batches: Sequence[Sequence[int]], *, temperature: float
    ) -> dict[str, float]:
        """Run this replica's part of an update; see `MegatronLearner.run_update`."""

        def loss_of(micro: BatchData, counts: MiniBatchCounts, logits: torch.Tensor) -> tuple[torch.Tensor, MetricSums]:
            return self._loss(*self._log_probs(logits, micro, temperature), micro, counts)

        found = self.run_update(batch, mini_batches, loss_of)
        return {name if "/" in name else f"actor/{name}": value for name, value in found.items()}

    def named_weights(self) -> Iterable[WeightTensor]:
        """Yield every weight, adapters merged in, by its name in the Hugging Face checkpoint; none
        without `TrainSettings.sends`.

        A collective: all ranks must exhaust the iterator. The model is not changed.
        """
        for name, weight in self._mapping.weights(self.model, self._merged):
            if self.settings.sends:
                yield to_weight(name, weight.cpu())

    def adapter(self) -> Adapter:
        """Gather the whole adapter; a collective.

        Raises:
            ConfigError: the policy has no LoRA.
        """
        lora = self._require_lora()
        return gather_adapter(
            self.adapters, lora, self.shape, self.ranks, base_model=str(self.path), fingerprint=self.fingerprint
        )

    def adapter_weights(self) -> Iterable[WeightTensor]:
        """Yield the adapter's tensors by PEFT's names, all ending in `.weight`; a collective."""
        for name, factor in peft_tensors(self.adapter()).items():
            yield dataclasses.replace(factor, name=name if name.endswith(".weight") else f"{name}.weight")

    def _export(self) -> Callable[[Path], Sequence[Path]]:
        """Copy the adapter in PEFT's format; without LoRA, or to merge it, the model in that of
        transformers.
        """
        if self.lora is not None and not self.settings.merge_on_save:
            return partial(write_adapter_files, adapter=self.adapter())
        writes = dist.get_rank() == 0
        weights = [dataclasses.replace(weight, data=weight.data.copy()) for weight in self.named_weights() if writes]
        return partial(write_model, base=self.path, weights=weights)

    def _log_probs(
        self, logits: torch.Tensor, micro: BatchData, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kept = KeptTokens.of(micro, logits.device)
        return log_probs(logits, self._targets(micro), temperature, kept)

    def _targets(self, micro: BatchData) -> torch.Tensor:
        return torch.tensor(np.asarray(micro.ragged("responses").values, np.int64), device=self.ranks.device)
