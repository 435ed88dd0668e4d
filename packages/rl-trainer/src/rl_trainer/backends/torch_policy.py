"""The policy under training, in plain torch: one process, any transformers causal language model."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_protocol import BatchData, ConfigError, OutputError, RaggedColumn, WeightTensor
from rl_protocol.torch import to_weight
from rl_trainer.algorithms.losses import BatchCounts, aggregate, kl_loss, ppo_policy_loss, token_log_probs
from rl_trainer.backends.optimise import Optimiser, Schedule
from rl_trainer.backends.tokens import TokenBatch, flat, mask_of, token_batch
from rl_trainer.config import ActorConfig
from rl_trainer.metrics import WeightedMeans


def load_model(path: str | Path) -> Any:
    """A transformers causal language model in float32, in evaluation mode (no dropout, also while training: PPO ratios must be exact).

    Raises:
        ConfigError: the folder can't be read as a model.
    """
    try:
        return AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32, local_files_only=True).eval()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.path={str(path)!r} can't be loaded as a transformers causal language model: {error}"
        ) from error


class TorchPolicyBackend:
    """PolicyBackend over a transformers model.

    Args:
        path: Hugging Face checkpoint folder (model and tokenizer).
        config: the actor's settings; None for a frozen policy (the reference), whose `update` is refused.
        rollout_n: responses per prompt; a mini-batch has ppo_mini_batch_size * rollout_n of them.
        seed: run seed, for the order of mini-batches.
        forward_rows: responses per forward pass when no gradient is needed.
    """

    def __init__(
        self,
        path: str | Path,
        config: ActorConfig | None,
        *,
        rollout_n: int = 1,
        seed: int = 0,
        forward_rows: int = 512,
    ) -> None:
        self._path = Path(path)
        self._model = load_model(path)
        self._pad_id = int(self._model.config.pad_token_id or 0)
        self._config = config
        self._forward_rows = forward_rows
        self._optimiser: Optimiser | None = None
        if config is not None:
            schedule = Schedule(
                epochs=config.ppo_epochs,
                mini_batch_rows=config.ppo_mini_batch_size * rollout_n,
                micro_batch_rows=config.ppo_micro_batch_size,
                seed=seed,
            )
            self._optimiser = Optimiser(self._model, config.optim, schedule)

    def compute_log_probs(self, batch: BatchData, *, temperature: float) -> BatchData:
        """See rl_protocol.ports.PolicyBackend.compute_log_probs."""
        log_probs: list[np.ndarray[Any, Any]] = []
        entropies: list[np.ndarray[Any, Any]] = []
        with torch.no_grad():
            for start in range(0, len(batch), self._forward_rows):
                part = batch.slice(start, min(start + self._forward_rows, len(batch)))
                log_prob, entropy = self._forward(token_batch(part, self._pad_id), temperature)
                log_probs.append(log_prob.numpy())
                entropies.append(entropy.numpy())
        offsets = batch.ragged("responses").offsets
        empty = [np.zeros(0, np.float32)]
        return BatchData(
            {
                "log_probs": RaggedColumn(np.concatenate(log_probs or empty), offsets, "float32"),
                "entropy": RaggedColumn(np.concatenate(entropies or empty), offsets, "float32"),
            }
        )

    def update(self, batch: BatchData, *, temperature: float) -> dict[str, float]:
        """See rl_protocol.ports.PolicyBackend.update; metrics are named actor/*."""
        config, optimiser = self._config, self._optimiser
        if config is None or optimiser is None:
            raise ConfigError("This policy was built frozen (config=None), as a reference; it can't be updated.")

        def loss(micro: BatchData, counts: BatchCounts, means: WeightedMeans) -> torch.Tensor:
            return self._loss(config, micro, counts, means, temperature)

        return {f"actor/{name}": value for name, value in optimiser.run(batch, loss).items()}

    def named_weights(self) -> Iterable[WeightTensor]:
        """Every parameter and persistent buffer, under the names of the Hugging Face checkpoint."""
        for name, tensor in self._model.state_dict().items():
            yield to_weight(name, tensor)

    def save_pretrained(self, path: Path) -> None:
        """Model and tokenizer, as transformers writes them.

        Raises:
            OutputError: a file can't be written.
        """
        tokenizer = AutoTokenizer.from_pretrained(str(self._path), local_files_only=True)
        try:
            self._model.save_pretrained(str(path))
            tokenizer.save_pretrained(str(path))
        except (OSError, SafetensorError) as error:
            raise OutputError(
                f"The checkpoint can't be written to {path}: {error}. Free some space or choose another folder."
            ) from error

    def _forward(self, tokens: TokenBatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self._model(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask, use_cache=False).logits
        return token_log_probs(logits[tokens.row, tokens.position], tokens.targets, temperature)

    def _loss(
        self, config: ActorConfig, micro: BatchData, counts: BatchCounts, means: WeightedMeans, temperature: float
    ) -> torch.Tensor:
        tokens, mask = token_batch(micro, self._pad_id), mask_of(micro)
        log_prob, entropy = self._forward(tokens, temperature)
        old = flat(micro, "old_log_probs")
        pg_loss, clipped, clipped_lower = ppo_policy_loss(
            log_prob,
            old,
            flat(micro, "advantages"),
            clip_low=config.clip_ratio_low,
            clip_high=config.clip_ratio_high,
            clip_c=config.clip_ratio_c,
        )
        per_token = pg_loss - config.entropy_coeff * entropy
        sums = {
            "pg_loss": pg_loss,
            "pg_clipfrac": clipped,
            "pg_clipfrac_lower": clipped_lower,
            "ppo_kl": old - log_prob,
        }
        if config.use_kl_loss:
            divergence = kl_loss(log_prob, flat(micro, "ref_log_prob"), config.kl_loss_type)
            per_token = per_token + config.kl_loss_coef * divergence
            sums["kl_loss"] = divergence
        means.add({name: float(value.detach()[mask].sum()) for name, value in sums.items()}, float(mask.sum()))
        return aggregate(per_token, mask, tokens.row, len(micro), counts, config.loss_agg_mode)
