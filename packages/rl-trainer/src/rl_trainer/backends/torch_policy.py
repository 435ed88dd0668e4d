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
from rl_trainer.algorithms.losses import BatchCounts, PolicyObjective, TokenColumns, sum_pi_squared, token_log_probs
from rl_trainer.backends.optimise import Optimiser, Schedule
from rl_trainer.backends.tokens import TokenBatch, flag, flat, mask_of, token_batch
from rl_trainer.config import ActorConfig, RolloutCorrectionConfig
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
        correction: settings of the rollout correction; the loss looks at them in bypass mode.
        sum_pi_squared: have `compute_log_probs` return that column as well.
        rollout_n: responses per prompt; a mini-batch has ppo_mini_batch_size * rollout_n of them.
        seed: run seed, for the order of mini-batches.
        forward_rows: responses per forward pass when no gradient is needed.
    """

    def __init__(
        self,
        path: str | Path,
        config: ActorConfig | None,
        *,
        correction: RolloutCorrectionConfig | None = None,
        sum_pi_squared: bool = False,
        rollout_n: int = 1,
        seed: int = 0,
        forward_rows: int = 512,
    ) -> None:
        self._path = Path(path)
        self._model = load_model(path)
        self._pad_id = int(self._model.config.pad_token_id or 0)
        self._config = config
        self._forward_rows = forward_rows
        self._sum_pi_squared = sum_pi_squared
        self._optimiser: Optimiser | None = None
        self._objective: PolicyObjective | None = None
        if config is not None:
            schedule = Schedule(
                epochs=config.ppo_epochs,
                mini_batch_rows=config.ppo_mini_batch_size * rollout_n,
                micro_batch_rows=config.ppo_micro_batch_size,
                seed=seed,
            )
            self._optimiser = Optimiser(self._model, config.optim, schedule)
            self._objective = PolicyObjective(config, correction or RolloutCorrectionConfig())

    def compute_log_probs(self, batch: BatchData, *, temperature: float) -> BatchData:
        """See rl_protocol.ports.PolicyBackend.compute_log_probs."""
        names, parts = ["log_probs", "entropy"], list[tuple[np.ndarray[Any, Any], ...]]()
        if self._sum_pi_squared:
            names.append("sum_pi_squared")
        with torch.no_grad():
            for start in range(0, len(batch), self._forward_rows):
                part = batch.slice(start, min(start + self._forward_rows, len(batch)))
                tokens = token_batch(part, self._pad_id)
                logits = self._logits(tokens)
                read = token_log_probs(logits, tokens.targets, temperature)
                if self._sum_pi_squared:
                    read = (*read, sum_pi_squared(logits, temperature))
                parts.append(tuple(values.numpy() for values in read))
        offsets, empty = batch.ragged("responses").offsets, (np.zeros(0, np.float32),) * len(names)
        columns = zip(names, zip(*(parts or [empty]), strict=True), strict=True)
        return BatchData({name: RaggedColumn(np.concatenate(p), offsets, "float32") for name, p in columns})

    def update(self, batch: BatchData, *, temperature: float) -> dict[str, float]:
        """See rl_protocol.ports.PolicyBackend.update; metrics are named actor/*, but for those that bring a name of their own."""
        objective, optimiser = self._objective, self._optimiser
        if objective is None or optimiser is None:
            raise ConfigError("This policy was built frozen (config=None), as a reference; it can't be updated.")

        def loss(micro: BatchData, counts: BatchCounts, means: WeightedMeans) -> torch.Tensor:
            tokens = token_batch(micro, self._pad_id)
            log_prob, entropy = token_log_probs(self._logits(tokens), tokens.targets, temperature)
            return objective(log_prob, entropy, _columns(micro, tokens), counts, means)

        metrics = optimiser.run(batch, loss)
        return {name if "/" in name else f"actor/{name}": value for name, value in metrics.items()}

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

    def _logits(self, tokens: TokenBatch) -> torch.Tensor:
        """[T, V] logits that each response token was drawn from."""
        logits = self._model(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask, use_cache=False).logits
        return logits[tokens.row, tokens.position]


def _columns(micro: BatchData, tokens: TokenBatch) -> TokenColumns:
    def optional(name: str) -> torch.Tensor | None:
        return flat(micro, name) if name in micro else None

    return TokenColumns(
        old_log_prob=flat(micro, "old_log_probs"),
        advantages=flat(micro, "advantages"),
        mask=mask_of(micro),
        row=tokens.row,
        rows=len(micro),
        ref_log_prob=optional("ref_log_prob"),
        weights=optional("rollout_is_weights"),
        chosen=flag(micro, "chosen_tokens") if "chosen_tokens" in micro else None,
    )
