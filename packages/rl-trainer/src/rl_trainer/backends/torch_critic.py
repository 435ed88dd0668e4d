"""The critic: the body of a causal language model with a scalar head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_protocol import BatchData, RaggedColumn
from rl_trainer.algorithms.losses import BatchCounts, aggregate, value_loss
from rl_trainer.backends.optimise import Optimiser, Schedule
from rl_trainer.backends.tokens import TokenBatch, flat, mask_of, token_batch
from rl_trainer.backends.torch_policy import load_model
from rl_trainer.config import CriticConfig
from rl_trainer.metrics import WeightedMeans, explained_variance


class ValueModel(torch.nn.Module):
    """Hidden states of a causal language model -> one value per place. The head starts at 0, so that first values are 0."""

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        language_model = load_model(path)
        self.pad_id = int(language_model.config.pad_token_id or 0)
        self.body = language_model.base_model
        self.head = torch.nn.Linear(language_model.config.hidden_size, 1)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def forward(self, tokens: TokenBatch) -> torch.Tensor:
        """Value before each response token, [T]."""
        hidden = self.body(
            input_ids=tokens.input_ids, attention_mask=tokens.attention_mask, use_cache=False
        ).last_hidden_state
        return self.head(hidden[tokens.row, tokens.position]).squeeze(-1).float()


class TorchCriticBackend:
    """CriticBackend over a transformers model.

    Args:
        path: Hugging Face checkpoint folder whose body the critic starts from.
        config: the critic's settings.
        rollout_n: responses per prompt; a mini-batch has ppo_mini_batch_size * rollout_n of them.
        seed: run seed, for the order of mini-batches.
        forward_rows: responses per forward pass when no gradient is needed.
    """

    def __init__(
        self, path: str | Path, config: CriticConfig, *, rollout_n: int, seed: int, forward_rows: int = 512
    ) -> None:
        self._model = ValueModel(path).eval()
        self._config = config
        self._forward_rows = forward_rows
        schedule = Schedule(
            epochs=config.ppo_epochs,
            mini_batch_rows=config.ppo_mini_batch_size * rollout_n,
            micro_batch_rows=config.ppo_micro_batch_size,
            seed=seed,
        )
        self._optimiser = Optimiser(self._model, config.optim, schedule)

    def compute_values(self, batch: BatchData) -> BatchData:
        """See rl_protocol.ports.CriticBackend.compute_values."""
        parts: list[np.ndarray[Any, Any]] = [np.zeros(0, np.float32)]
        with torch.no_grad():
            for start in range(0, len(batch), self._forward_rows):
                part = batch.slice(start, min(start + self._forward_rows, len(batch)))
                parts.append(self._model(token_batch(part, self._model.pad_id)).numpy())
        return BatchData({"values": RaggedColumn(np.concatenate(parts), batch.ragged("responses").offsets, "float32")})

    def update(self, batch: BatchData) -> dict[str, float]:
        """See rl_protocol.ports.CriticBackend.update; metrics are named critic/*."""
        metrics = {f"critic/{name}": value for name, value in self._optimiser.run(batch, self._loss).items()}
        mask = batch.ragged("response_mask").values.astype(np.bool_)
        old = batch.ragged("values").values.astype(np.float64)[mask]
        returns = batch.ragged("returns").values.astype(np.float64)[mask]
        return metrics | {"critic/vf_explained_var": explained_variance(old, returns)}

    def _loss(self, micro: BatchData, counts: BatchCounts, means: WeightedMeans) -> torch.Tensor:
        tokens, mask = token_batch(micro, self._model.pad_id), mask_of(micro)
        values = self._model(tokens)
        loss, clipped = value_loss(values, flat(micro, "values"), flat(micro, "returns"), self._config.cliprange_value)
        sums = {"vf_loss": loss, "vf_clipfrac": clipped, "vpred_mean": values}
        means.add({name: float(value.detach()[mask].sum()) for name, value in sums.items()}, float(mask.sum()))
        return aggregate(loss, mask, tokens.row, len(micro), counts, self._config.loss_agg_mode)
