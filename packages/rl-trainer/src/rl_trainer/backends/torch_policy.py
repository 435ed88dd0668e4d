"""The policy under training: any transformers causal language model, whole or with LoRA adapters, in one process or over ranks."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoTokenizer

from rl_protocol import BatchData, ConfigError, OutputError, WeightTensor
from rl_protocol.torch import to_weight
from rl_trainer.algorithms.batching import schedule_rows
from rl_trainer.algorithms.losses import BatchCounts, PolicyObjective, sum_pi_squared, token_log_probs
from rl_trainer.backends.engine import ModelEngine, PlainEngine, address, whole
from rl_trainer.backends.loading import Facts, layer_names, load_model, require_alone
from rl_trainer.backends.optimise import Optimiser
from rl_trainer.backends.passes import Passes, per_token
from rl_trainer.backends.state import restore, snapshot
from rl_trainer.backends.tokens import TokenBatch, lengths_of, token_batch, token_columns
from rl_trainer.checkpoints.stateful import Write
from rl_trainer.config import ActorConfig, RolloutCorrectionConfig
from rl_trainer.data.images import PROCESSORS
from rl_trainer.lora import LoraConfig
from rl_trainer.metrics import WeightedMeans


class TorchPolicyBackend:
    """PolicyBackend over a transformers model.

    Args:
        path: Hugging Face checkpoint folder (model and tokenizer).
        config: the actor's settings; None for a frozen policy with the defaults.
        lora: adapters to train in place of all weights; needs the extra `lora`.
        correction: settings of the rollout correction; the loss looks at them in bypass mode.
        sum_pi_squared: have `compute_log_probs` return that column as well.
        rollout_n: responses per prompt; a mini-batch has ppo_mini_batch_size * rollout_n of them.
        seed: run seed, for the order of mini-batches and fresh adapters.
        forward_rows: responses per forward pass when no gradient is needed.
        engine: how the model is held; None: whole, in this process.
        frozen: it is a reference, whose `update` is refused: the config says how to compute alone.
    """

    def __init__(
        self,
        path: str | Path,
        config: ActorConfig | None,
        *,
        lora: LoraConfig | None = None,
        correction: RolloutCorrectionConfig | None = None,
        sum_pi_squared: bool = False,
        rollout_n: int = 1,
        seed: int = 0,
        forward_rows: int = 512,
        engine: ModelEngine | None = None,
        frozen: bool = False,
    ) -> None:
        self._path = Path(path)
        self._engine = engine or PlainEngine()
        self._config = config or ActorConfig()
        self._lora = lora if lora is not None and lora.rank else None
        self._model = load_model(path, packed=self._config.use_remove_padding)
        self._facts = Facts.of(self._model)
        require_alone(self._facts, lora=self._lora is not None, ranks=self._engine.world.size)
        layers = layer_names(self._model)
        if self._lora is not None:
            from rl_trainer.backends.lora import attach  # peft comes with an extra of its own

            self._model = attach(self._model, self._lora, seed)
        self._engine.prepare(self._model, layers)
        self._sum_pi_squared = sum_pi_squared
        world, tokens = self._engine.world, self._config.ppo_max_token_len
        self._forward = Passes(world=world, max_rows=forward_rows, max_tokens=tokens)
        self._schedule = self._config.schedule(rollout_n, seed)
        self._updates = 0
        self._optimiser: Optimiser | None = None
        if config is not None and not frozen:
            passes = Passes(world=world, max_rows=config.ppo_micro_batch_size, max_tokens=tokens)
            self._optimiser = Optimiser(self._model, config.optim, passes)
            self._objective = PolicyObjective(config, correction or RolloutCorrectionConfig())

    def compute_log_probs(self, batch: BatchData, *, temperature: float) -> BatchData:
        """See rl_protocol.ports.PolicyBackend.compute_log_probs."""
        names = ["log_probs", "entropy", *(["sum_pi_squared"] if self._sum_pi_squared else [])]

        def compute(part: BatchData) -> Sequence[torch.Tensor]:
            tokens = self._tokens(part)
            logits = self._logits(tokens)
            read = token_log_probs(logits, tokens.targets, temperature)
            return (*read, sum_pi_squared(logits, temperature)) if self._sum_pi_squared else read

        return per_token(batch, self._forward, names, compute)

    def compute_reference_log_probs(self, batch: BatchData, *, temperature: float) -> BatchData:
        """`log_probs` and `entropy` of the policy before any training: this model without its adapter.

        Raises:
            ConfigError: a policy without LoRA, whose first weights are gone.
        """
        if self._lora is None:
            raise ConfigError(
                "Without LoRA (lora.rank=0) the policy does not know what it was before training; use a reference worker."
            )
        with self._model.disable_adapter():
            return self.compute_log_probs(batch, temperature=temperature)

    def update(self, batch: BatchData, *, temperature: float) -> dict[str, float]:
        """See rl_protocol.ports.PolicyBackend.update; metrics are named actor/*, but for those that bring a name of their own."""
        mini_batches = list(schedule_rows(lengths_of(batch), self._schedule, self._updates))
        return self.update_share(batch, mini_batches, temperature=temperature)

    def update_share(
        self, batch: BatchData, mini_batches: Sequence[Sequence[int]], *, temperature: float
    ) -> dict[str, float]:
        """See rl_trainer.workers.RankedPolicy.update_share."""
        optimiser = self._trained()

        def loss(micro: BatchData, counts: BatchCounts, means: WeightedMeans) -> torch.Tensor:
            tokens = self._tokens(micro)
            log_prob, entropy = token_log_probs(self._logits(tokens), tokens.targets, temperature)
            return self._objective(log_prob, entropy, token_columns(micro, tokens.row), counts, means)

        with self._dropout():
            metrics = optimiser.run(batch, mini_batches, loss)
        self._updates += 1
        return {name if "/" in name else f"actor/{name}": value for name, value in metrics.items()}

    def named_weights(self) -> Iterable[WeightTensor]:
        """Every parameter and persistent buffer, adapters merged in, under the names of the Hugging Face checkpoint.

        On several ranks it is a collective: all must go through it, from beginning to end.
        """
        state = self._model.state_dict()
        if self._lora is None:
            pairs = ((name, whole(tensor)) for name, tensor in state.items())
        else:
            from rl_trainer.backends.lora import merged_weights  # see above

            pairs = merged_weights(state, self._lora, whole)
        for name, tensor in pairs:
            yield to_weight(name, tensor)

    def adapter_weights(self) -> Iterable[WeightTensor]:
        """The tensors of the adapter alone, under PEFT's names; see `named_weights`.

        Raises:
            ConfigError: a policy without LoRA.
        """
        if self._lora is None:
            raise ConfigError("Without LoRA (lora.rank=0) the policy has no adapter to send.")
        from rl_trainer.backends.lora import adapter_weights  # see above

        for name, tensor in adapter_weights(self._model.state_dict(), whole):
            yield to_weight(name, tensor)

    def save_pretrained(self, path: Path) -> None:
        """Model and tokenizer, as transformers writes them; with LoRA the adapter alone, as peft does. On several ranks it is a collective.

        Raises:
            OutputError: a file can't be written.
        """
        self.export()(path)

    def export(self) -> Write:
        """See rl_trainer.checkpoints.stateful.Exportable; on several ranks it is a collective, of which the first one writes."""
        writes = not self._engine.world.rank
        state, copies = dict[str, torch.Tensor](), dict[int, torch.Tensor]()
        for name, tensor in self._model.state_dict().items():
            found = whole(tensor) if self._saves(name) else None
            if found is not None and writes:  # tied weights stay one tensor, as transformers expects
                state[name] = copies.setdefault(address(tensor), found.clone())

        def write(path: Path) -> Sequence[Path]:
            if not writes:
                return []
            tokenizer = AutoTokenizer.from_pretrained(str(self._path), local_files_only=True)
            processors = [self._path / name for name in PROCESSORS if (self._path / name).exists()]
            more: dict[str, Any] = {} if self._lora is None else {"save_embedding_layers": False}
            try:
                self._model.save_pretrained(str(path), state_dict=state, **more)
                tokenizer.save_pretrained(str(path))
                for file in processors:
                    shutil.copyfile(file, path / file.name)
            except (OSError, SafetensorError) as error:
                raise OutputError(
                    f"The checkpoint can't be written to {path}: {error}. Free some space or choose another folder."
                ) from error
            return [file for file in path.rglob("*") if file.is_file()]

        return write

    def snapshot(self) -> Write:
        """See rl_trainer.checkpoints.stateful.Resumable."""
        return snapshot(self._model, self._trained(), self._updates, self._engine.world)

    def restore(self, folder: Path) -> None:
        """See rl_trainer.checkpoints.stateful.Resumable."""
        self._updates = restore(self._model, self._trained(), folder, self._engine.world)

    def _trained(self) -> Optimiser:
        if self._optimiser is None:
            raise ConfigError("This policy was built frozen, as a reference; it can't be updated.")
        return self._optimiser

    def _saves(self, name: str) -> bool:
        return self._lora is None or ".lora_" in name

    def _dropout(self) -> Any:
        if self._lora is None or not self._lora.dropout:
            return nullcontext()
        from rl_trainer.backends.lora import dropping  # see above

        return dropping(self._model)

    def _tokens(self, batch: BatchData) -> TokenBatch:
        return token_batch(
            batch,
            self._facts.pad_id,
            packed=self._config.use_remove_padding,
            device=self._engine.device,
            image_token=self._facts.image_token,
        )

    def _logits(self, tokens: TokenBatch) -> torch.Tensor:
        """[T, V] logits that each response token was drawn from; a packed model computes no others, a padded one none of the prompts'
        common beginning."""
        if self._config.use_remove_padding:
            return self._model(**tokens.inputs, logits_to_keep=tokens.position, use_cache=False).logits[0]
        width = tokens.inputs["input_ids"].shape[1]
        places = torch.arange(tokens.first, width, device=tokens.position.device)
        out = self._model(**tokens.inputs, logits_to_keep=places, use_cache=False)
        return tokens.read(out.logits, tokens.first)
