"""The training ports: PolicyBackend and CriticBackend."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

from rl_protocol.batch.batch_data import BatchData
from rl_protocol.ports.weights import WeightSender


@runtime_checkable
class PolicyBackend(WeightSender, Protocol):
    """A policy under training."""

    def compute_log_probs(self, batch: BatchData, *, temperature: float) -> BatchData:
        """Compute the ragged float32 columns `log_probs` and `entropy`, one value per response
        token.

        Reads `prompts`, `responses`, and the image columns if there are any.
        """
        ...

    def update(self, batch: BatchData, *, temperature: float) -> dict[str, float]:
        """Optimize over the batch (epochs and minibatches as configured); return metrics as plain
        floats."""
        ...

    def save_pretrained(self, path: Path) -> None:
        """Write the policy as a Hugging Face checkpoint folder."""
        ...


@runtime_checkable
class CriticBackend(Protocol):
    """A value function under training."""

    def compute_values(self, batch: BatchData) -> BatchData:
        """Compute the ragged float32 column `values`: V(s_t) before each response token.

        Reads `prompts` and `responses`.
        """
        ...

    def update(self, batch: BatchData) -> dict[str, float]:
        """Optimize over the batch; return metrics as plain floats."""
        ...
