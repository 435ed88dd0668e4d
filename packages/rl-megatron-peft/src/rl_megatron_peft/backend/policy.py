"""The policy under training: a Megatron-Core model, whole or with LoRA adapters, behind the PolicyBackend port."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from rl_megatron_peft.adapter import Adapter, read_adapter, tensors_of, write_files
from rl_megatron_peft.backend.exchange import gather_adapter, scatter_adapter
from rl_megatron_peft.backend.learner import MegatronLearner, MiniBatchCounts, Reported
from rl_megatron_peft.backend.lora import adapters_off
from rl_megatron_peft.backend.passes import log_probs
from rl_megatron_peft.backend.whole import write_model
from rl_megatron_peft.config import LoraConfig
from rl_protocol import BatchData, ConfigError, WeightTensor
from rl_protocol.torch import to_weight


class PolicyLoss(Protocol):
    """The loss of the trainer, handed in by whoever puts trainer and backend together: neither imports the other."""

    def __call__(
        self, log_prob: torch.Tensor, entropy: torch.Tensor, micro: BatchData, counts: MiniBatchCounts
    ) -> tuple[torch.Tensor, Reported]:
        """Of one micro-batch of T response tokens.

        Args:
            log_prob: [T] with gradient.
            entropy: [T] of each distribution, nats, with gradient.
            micro: its rows, all columns.
            counts: of the whole mini-batch.

        Returns:
            Its share of the mini-batch's loss (shares are summed), and what is reported.
        """
        ...


class MegatronPolicyBackend(MegatronLearner[PolicyLoss]):
    """PolicyBackend over Megatron-Core; see MegatronLearner."""

    def compute_log_probs(self, batch: BatchData, *, temperature: float) -> BatchData:
        """See rl_protocol.ports.PolicyBackend.compute_log_probs."""

        def read(part: BatchData, logits: torch.Tensor) -> torch.Tensor:
            return torch.stack(log_probs(logits, self._targets(part), temperature))

        return self.compute(batch, ["log_probs", "entropy"], read)

    def compute_reference_log_probs(self, batch: BatchData, *, temperature: float) -> BatchData:
        """`log_probs` and `entropy` of the policy before any training: this model with its adapters off.

        Raises:
            ConfigError: a policy without LoRA, whose first weights are gone.
        """
        self._adapted()
        with adapters_off(self.adapters):
            return self.compute_log_probs(batch, temperature=temperature)

    def update(self, batch: BatchData, *, temperature: float) -> dict[str, float]:
        """See rl_protocol.ports.PolicyBackend.update; metrics are named actor/*, but for those that bring a name of their own."""
        return self.update_share(batch, self.scheduled(batch), temperature=temperature)

    def update_share(
        self, batch: BatchData, mini_batches: Sequence[Sequence[int]], *, temperature: float
    ) -> dict[str, float]:
        """This replica's part of an update; see MegatronLearner.optimise."""

        def share(micro: BatchData, counts: MiniBatchCounts, logits: torch.Tensor) -> tuple[torch.Tensor, Reported]:
            return self._loss(*log_probs(logits, self._targets(micro), temperature), micro, counts)

        found = self.optimise(batch, mini_batches, share)
        return {name if "/" in name else f"actor/{name}": value for name, value in found.items()}

    def named_weights(self) -> Iterable[WeightTensor]:
        """Every weight with its adapter merged in, under the names of the Hugging Face checkpoint; nothing is changed in place.

        A collective: all ranks must go through it, from beginning to end.
        """
        for name, weight in self._mapping.weights(self.model, self._merged):
            yield to_weight(name, weight.cpu())

    def adapter(self) -> Adapter:
        """The whole adapter, as PEFT has it; a collective.

        Raises:
            ConfigError: a policy without LoRA.
        """
        lora = self._adapted()
        return gather_adapter(
            self.adapters, lora, self.shape, self.ranks, base_model=str(self.path), fingerprint=self.fingerprint
        )

    def adapter_weights(self) -> Iterable[WeightTensor]:
        """The tensors of the adapter under PEFT's names in a model, which all end in `.weight`, without the base; a collective."""
        for name, factor in tensors_of(self.adapter()).items():
            yield dataclasses.replace(factor, name=name if name.endswith(".weight") else f"{name}.weight")

    def _export(self) -> Callable[[Path], Sequence[Path]]:
        """With LoRA the adapter as PEFT has it, else the model as transformers has it."""
        if self.lora is not None:
            return partial(write_files, adapter=self.adapter())
        writes = dist.get_rank() == 0
        weights = [dataclasses.replace(weight, data=weight.data.copy()) for weight in self.named_weights() if writes]
        return partial(write_model, base=self.path, weights=weights)

    def load_adapter(self, path: Path) -> None:
        """Take over the adapter of a PEFT folder; the optimizer's state stays as it is.

        Raises:
            AdapterError: damaged, of another base model, or not what was attached; names file and field, nothing was changed.
            ConfigError: a policy without LoRA.
        """
        lora = self._adapted()
        scatter_adapter(
            read_adapter(path),
            self.adapters,
            lora,
            self.shape,
            self.ranks,
            fingerprint=self.fingerprint,
            source=str(path),
        )

    def _adapted(self) -> LoraConfig:
        if self.lora is None:
            raise ConfigError(
                "All weights of this policy are trained: it has no adapter, and does not know what it was before. Set a LoraConfig.",
                field="lora",
            )
        return self.lora

    def _targets(self, part: BatchData) -> torch.Tensor:
        return torch.tensor(np.asarray(part.ragged("responses").values, np.int64), device=self.ranks.device)
