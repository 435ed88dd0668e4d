"""The critic: the body of a causal language model with a scalar head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rl_protocol import BatchData, ConfigError
from rl_trainer.algorithms.batching import schedule_rows
from rl_trainer.algorithms.losses.aggregate import BatchCounts
from rl_trainer.algorithms.losses.value_loss import ValueObjective, value_fit
from rl_trainer.algorithms.metrics import WeightedMeans
from rl_trainer.backends.forward_passes import ForwardPasses, per_token
from rl_trainer.backends.loading import Facts, layer_names
from rl_trainer.backends.optimizer import MiniBatchOptimizer, adapter_dropout
from rl_trainer.backends.parallel_strategy import ParallelStrategy, PlainStrategy
from rl_trainer.backends.snapshot import restore, snapshot, state_digest
from rl_trainer.backends.token_batch import TokenBatch, lengths_of, token_batch, value_columns
from rl_trainer.checkpoints.resumable import Write
from rl_trainer.config import CriticConfig
from rl_trainer.config.lora import LoraConfig
from rl_trainer.kernels.linear import row_multiple


class ValueModel(torch.nn.Module):
    """The body of a causal language model with one value per place; first values are 0."""

    def __init__(self, language_model: Any) -> None:
        super().__init__()
        self.facts = Facts.of(language_model)
        self.layers = layer_names(language_model)
        self.body = language_model.base_model
        self.prefix = f"{language_model.base_model_prefix}."
        """Of the names of the body's weights in its whole model."""
        self.head = torch.nn.Linear(self.facts.hidden_size, 1)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def forward(self, tokens: TokenBatch) -> torch.Tensor:
        """Value before each response token, [T]."""
        hidden = self.body(**tokens.inputs, use_cache=False).last_hidden_state
        values = self.head(tokens.read(hidden)).squeeze(-1)
        return values.to(torch.float32, copy=True)  # FSDP2 warns of a view


class TorchCriticBackend:
    """CriticBackend over a transformers model.

    Args:
        path: Hugging Face checkpoint folder whose body the critic starts from.
        config: the critic's settings.
        lora: adapters to train beside the value head, in place of all weights; needs the extra
            `lora`. The folder of its adapter_path may hold a value head, too; else first values
            are 0.
        rollout_n: responses per prompt; a mini-batch has ppo_mini_batch_size * rollout_n of them.
        seed: run seed, for the order of mini-batches and fresh adapters.
        strategy: how the model is spread over ranks; None: it is in this process.
    """

    def __init__(
        self,
        path: str | Path,
        config: CriticConfig,
        *,
        lora: LoraConfig | None = None,
        rollout_n: int,
        seed: int,
        strategy: ParallelStrategy | None = None,
    ) -> None:
        self._strategy = strategy or PlainStrategy()
        self._config = config
        self._lora = lora if lora is not None and lora.rank else None
        dora = self._lora is not None and self._lora.use_dora  # begins with the norms of the weights
        language_model, unread = self._strategy.load(Path(path), packed=config.use_remove_padding, whole=dora)
        self._model = ValueModel(language_model).eval()
        if self._lora is not None:
            from rl_trainer.backends.peft_lora import attach_to_critic  # needs the extra `lora`

            attach_to_critic(self._model.body, self._model.prefix, self._model.head, self._lora, seed)
        self._strategy.prepare(self._model, self._model.layers, unread)
        self._schedule = config.schedule(rollout_n, seed)
        self._objective = ValueObjective(config)
        world = self._strategy.world
        self._forward = ForwardPasses.of(world, config, max_rows=0)
        self._optimizer = MiniBatchOptimizer(
            self._model, config.optim, ForwardPasses.of(world, config), offload=self._strategy.optimizer_offload
        )
        self._updates = 0

    def share_base(self, base: Mapping[str, torch.Tensor]) -> None:
        """Use the frozen weights of a policy with adapters in this process, instead of copies.

        Args:
            base: `TorchPolicyBackend.base_weights` of a policy from the same folder, with the same
                PlainStrategy.

        Raises:
            ConfigError: the critic has no adapters, so its weights change.
        """
        if self._lora is None:
            raise ConfigError("Without LoRA (LoraConfig.rank=0) the critic has no frozen weights to share.")
        from rl_trainer.backends.peft_lora import share_base_of  # needs the extra `lora`

        share_base_of(self._model.body, self._model.prefix, base)

    def compute_values(self, batch: BatchData) -> BatchData:
        return per_token(batch, self._forward, ["values"], lambda part: [self._model(self._tokens(part))])

    def update(self, batch: BatchData) -> dict[str, float]:
        """Update the value function; metrics are named critic/*."""
        return self.update_local(batch, list(schedule_rows(lengths_of(batch), self._schedule, self._updates)))

    def update_local(self, batch: BatchData, mini_batches: Sequence[Sequence[int]]) -> dict[str, float]:
        with adapter_dropout(self._model, self._lora):
            found = self._optimizer.run(batch, mini_batches, self._loss)
        self._updates += 1
        fit = value_fit(batch, mini_batches, self._strategy.world.total)
        return {f"critic/{name}": value for name, value in found.items()} | fit

    def snapshot(self) -> Write:
        return snapshot(self._model, self._optimizer, self._updates, self._strategy.world)

    def state_digest(self) -> str:
        return state_digest(self._model, self._optimizer, self._strategy.world)

    def restore(self, folder: Path) -> None:
        self._updates = restore(self._model, self._optimizer, folder, self._strategy.world)

    def _tokens(self, batch: BatchData) -> TokenBatch:
        return token_batch(
            batch,
            self._model.facts.pad_id,
            packed=self._config.use_remove_padding,
            device=self._strategy.device,
            image_token=self._model.facts.image_token,
            pieces=self._model.facts.pieces,
            blank=self._model.facts.blank(self._strategy.world.size),
            multiple=row_multiple(self._strategy.device),
        )

    def _loss(self, micro: BatchData, counts: BatchCounts, means: WeightedMeans) -> torch.Tensor:
        tokens = self._tokens(micro)
        return self._objective(self._model(tokens), value_columns(micro, tokens.row), counts, means)
