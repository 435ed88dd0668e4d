"""The policy: a transformers causal language model, optionally with LoRA and on several ranks."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoTokenizer

from rl_protocol import BatchData, ConfigError, OutputError, RaggedColumn, WeightTensor
from rl_protocol.ports import WeightCapabilities
from rl_protocol.rl_columns import ROUTED_COLUMNS
from rl_protocol.torch import TORCH_DTYPES, to_weight
from rl_trainer.algorithms.batching import schedule_rows
from rl_trainer.algorithms.log_probs import log_prob_columns
from rl_trainer.algorithms.losses.aggregate import BatchCounts
from rl_trainer.algorithms.losses.policy_objective import PolicyObjective
from rl_trainer.algorithms.metrics import WeightedMeans
from rl_trainer.backends.experts.routed_tokens import recorded_columns
from rl_trainer.backends.experts.routing import ExpertRouting
from rl_trainer.backends.forward_passes import ForwardPasses, per_token
from rl_trainer.backends.loading import Facts, layer_names
from rl_trainer.backends.optimizer import MiniBatchOptimizer, MovingAverage, adapter_dropout
from rl_trainer.backends.output_head import OutputHead
from rl_trainer.backends.parallel_strategy import ParallelStrategy, PlainStrategy, full_tensors
from rl_trainer.backends.snapshot import restore, snapshot, state_digest
from rl_trainer.backends.token_batch import TokenBatch, lengths_of, token_batch, token_columns
from rl_trainer.backends.world import CPU
from rl_trainer.checkpoints.resumable import Write
from rl_trainer.config import ActorConfig, RolloutCorrectionConfig
from rl_trainer.config.lora import LoraConfig
from rl_trainer.data.images import PROCESSORS
from rl_trainer.kernels.linear import row_multiple

TOP_COLUMNS = ("top_log_probs", "top_tokens")
"""Largest log-probs at each token, and the tokens that have them."""


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """What a run asks of the policy beside its own settings.

    Attributes:
        correction: rollout correction that the loss makes; None: none.
        sum_pi_squared: `compute_log_probs` also returns that column.
        top: `compute_log_probs` of a frozen policy, and the initial log-probs of one with adapters,
            also find that many of the most probable tokens (at most all), in TOP_COLUMNS.
        forward_rows: responses per forward pass when no gradient is needed; 0: as many as have
            PASS_TOKENS tokens.
        frozen: the policy is a reference: `update` is refused, and no optimizer is built.
        replays_experts: forward passes of rows with ROUTED_COLUMNS take these experts.
        records_experts: `compute_log_probs` also returns those columns.
        teacher_ema: `compute_teacher_log_probs` is of the moving average of the weights, of which
            that part stays at each update; 0: of the policy as it is.
        sent_as: element type of `named_weights`. Weights are cast on their device, so a GPU copies
            half of the bytes to the host for bfloat16, and the host does not cast them.
        sends: false on a rank whose weights another one sends: `named_weights` and
            `adapter_weights` take part in gathering them, copy nothing to the host and yield
            nothing.
    """

    correction: RolloutCorrectionConfig | None = None
    sum_pi_squared: bool = False
    top: int = 0
    forward_rows: int = 0
    frozen: bool = False
    replays_experts: bool = False
    records_experts: bool = False
    teacher_ema: float = 0.0
    sent_as: str = "float32"
    sends: bool = True


class TorchPolicyBackend:
    """PolicyBackend over a transformers model.

    Args:
        path: Hugging Face checkpoint folder (model and tokenizer).
        config: the actor's settings; None for a frozen policy with the defaults.
        lora: adapters to train in place of all weights; needs the extra `lora`.
        rollout_n: responses per prompt; a mini-batch has ppo_mini_batch_size * rollout_n of them.
        seed: run seed, for the order of mini-batches and fresh adapters.
        strategy: how the model is spread over ranks; None: not at all, it is in this process.
        options: see PolicyOptions.
    """

    capabilities = WeightCapabilities()

    def __init__(
        self,
        path: str | Path,
        config: ActorConfig | None,
        *,
        lora: LoraConfig | None = None,
        rollout_n: int = 1,
        seed: int = 0,
        strategy: ParallelStrategy | None = None,
        options: PolicyOptions = PolicyOptions(),  # noqa: B008 (frozen)
    ) -> None:
        self._path = Path(path)
        self._strategy = strategy or PlainStrategy()
        self._config = config or ActorConfig()
        self._lora = lora if lora is not None and lora.rank else None
        dora = self._lora is not None and self._lora.use_dora  # begins with the norms of the weights
        packed = self._config.use_remove_padding
        self._model, unread = self._strategy.load(self._path, packed=packed, whole=dora, frozen=options.frozen)
        self._facts = Facts.of(self._model)
        layers = layer_names(self._model)
        if self._lora is not None:
            from rl_trainer.backends.peft_lora import attach  # needs the extra `lora`

            self._model = attach(self._model, self._lora, seed)
        self._head = OutputHead.of(self._model)
        if options.frozen:
            self._model.requires_grad_(False)
        self._strategy.prepare(self._model, layers, unread)
        self._experts = ExpertRouting(self._model) if options.replays_experts else None
        self._records_experts = options.records_experts
        self._sum_pi_squared = options.sum_pi_squared
        self._top = min(options.top, self._model.config.get_text_config().vocab_size)
        self._frozen = options.frozen
        self._sent_as, self._sends = TORCH_DTYPES[options.sent_as], options.sends
        world = self._strategy.world
        self._forward = ForwardPasses.of(world, self._config, options.forward_rows)
        self._schedule = self._config.schedule(rollout_n, seed)
        self._updates = 0
        self._optimizer: MiniBatchOptimizer | None = None
        if config is not None and not options.frozen:
            self._optimizer = MiniBatchOptimizer(
                self._model, config.optim, ForwardPasses.of(world, config), offload=self._strategy.optimizer_offload
            )
            self._objective = PolicyObjective(config, options.correction)
        self._average = MovingAverage(self._model, options.teacher_ema) if options.teacher_ema else None

    def compute_log_probs(self, batch: BatchData, *, temperature: float) -> BatchData:
        top = self._top if self._frozen else 0
        return self._compute(batch, temperature, squares=self._sum_pi_squared, top=top, experts=self._records_experts)

    def _compute(
        self, batch: BatchData, temperature: float, *, squares: bool, top: int, experts: bool = False
    ) -> BatchData:
        names = ["log_probs", "entropy", *(["sum_pi_squared"] if squares else []), *(TOP_COLUMNS if top else ())]
        names += ROUTED_COLUMNS if experts else ()

        def compute(part: BatchData) -> Sequence[torch.Tensor | RaggedColumn]:
            tokens = self._tokens(part)
            with self._experts.recording() if self._experts and experts else nullcontext() as chosen:
                rows = self._columns(tokens, temperature, squares=squares, top=top)
            recorded = [] if chosen is None else recorded_columns(chosen, part, tokens.places())
            if not top:
                return [*rows.unbind(), *recorded]
            return [*rows[: -2 * top], rows[-2 * top : -top].t(), rows[-top:].t().long(), *recorded]

        return per_token(batch, self._forward, names, compute)

    def compute_reference_log_probs(self, batch: BatchData, *, temperature: float) -> BatchData:
        """`log_probs` and `entropy` of the initial policy: this model without its adapter.

        Raises:
            ConfigError: the policy has no LoRA, so its initial weights are gone.
        """
        if self._lora is None:
            raise ConfigError(
                "Without LoRA (LoraConfig.rank=0) the policy can't compute its initial log-probs; use a reference worker."
            )
        from rl_trainer.backends.peft_lora import without_adapter  # needs the extra `lora`

        with without_adapter(self._model):
            return self._compute(batch, temperature, squares=False, top=self._top)

    def compute_teacher_log_probs(self, batch: BatchData, *, temperature: float) -> BatchData:
        """`log_probs`, `entropy` and the most probable tokens of this policy as it is, or of its
        moving average (PolicyOptions.teacher_ema).
        """
        with self._average.applied() if self._average is not None else nullcontext():
            return self._compute(batch, temperature, squares=False, top=self._top)

    def update(self, batch: BatchData, *, temperature: float) -> dict[str, float]:
        """Update the policy; metrics are named actor/* unless their name contains a slash."""
        mini_batches = list(schedule_rows(lengths_of(batch), self._schedule, self._updates))
        return self.update_local(batch, mini_batches, temperature=temperature)

    def update_local(
        self, batch: BatchData, mini_batches: Sequence[Sequence[int]], *, temperature: float
    ) -> dict[str, float]:
        optimizer = self._trained()

        def loss(micro: BatchData, counts: BatchCounts, means: WeightedMeans) -> torch.Tensor:
            tokens = self._tokens(micro)
            columns = token_columns(micro, tokens.row)
            rows = self._columns(tokens, temperature, squares=False, others=columns.top_tokens)
            top = rows[1:-1].t() if columns.top_tokens is not None else None
            return self._objective(rows[0], rows[-1], columns, counts, means, top)

        with adapter_dropout(self._model, self._lora):
            metrics = optimizer.run(batch, mini_batches, loss)
        self._updates += 1
        if self._average is not None:
            self._average.update()
        return {name if "/" in name else f"actor/{name}": value for name, value in metrics.items()}

    def named_weights(self) -> Iterable[WeightTensor]:
        """Every parameter and persistent buffer under its checkpoint's name, with adapters merged
        in; see PolicyOptions.sent_as.

        On several ranks this is a collective: all ranks must iterate to the end.
        """
        state = self._model.state_dict()
        if self._lora is None:
            items = full_tensors((name, (self._as_sent(tensor),)) for name, tensor in state.items())
            pairs = ((name, tensor) for name, (tensor,) in items)
        else:
            from rl_trainer.backends.peft_lora import merged_weights  # needs the extra `lora`

            pairs = merged_weights(state, self._lora, full_tensors)
        for name, tensor in pairs:
            if self._sends:
                yield to_weight(name, self._as_sent(tensor))

    def _as_sent(self, tensor: torch.Tensor) -> torch.Tensor:
        """A weight, or this rank's part of it, in the element type that is sent."""
        return tensor.to(self._sent_as) if tensor.is_floating_point() else tensor

    def adapter_weights(self) -> Iterable[WeightTensor]:
        """The adapter's tensors under PEFT's names; see `named_weights`.

        Raises:
            ConfigError: the policy has no LoRA.
        """
        if self._lora is None:
            raise ConfigError("Without LoRA (LoraConfig.rank=0) the policy has no adapter to send.")
        from rl_trainer.backends.peft_lora import adapter_weights  # needs the extra `lora`

        for name, tensor in adapter_weights(self._model.state_dict(), full_tensors):
            if self._sends:
                yield to_weight(name, tensor)

    def base_weights(self) -> Mapping[str, torch.Tensor]:
        """The memory of the frozen weights, under their checkpoint's names; read-only.

        Raises:
            ConfigError: the policy has no LoRA, so its weights change.
        """
        if self._lora is None:
            raise ConfigError("Without LoRA (LoraConfig.rank=0) the policy has no frozen weights to share.")
        from rl_trainer.backends.peft_lora import base_weights  # needs the extra `lora`

        return base_weights(self._model.state_dict())

    def save_pretrained(self, path: Path) -> None:
        """Write model and tokenizer like transformers; with LoRA, unless it is merged on save, only
        the adapter, like peft.

        On several ranks this is a collective.

        Raises:
            OutputError: a file can't be written.
        """
        self.export()(path)

    def export(self) -> Write:
        """Copy the policy. On several ranks this is a collective, and the first rank writes."""
        writes = not self._strategy.world.rank
        state, copies = dict[str, torch.Tensor](), dict[int, torch.Tensor]()
        for name, parameter, tensor in self._exported():
            if writes:  # tied weights stay one tensor for transformers
                state[name] = copies.setdefault(parameter, tensor.to(CPU, copy=True))
        model, more = self._model, dict[str, Any]()
        if self._lora is not None and self._lora.merge_on_save:
            model = model.get_base_model()
        elif self._lora is not None:
            more = {"save_embedding_layers": False}

        def write(path: Path) -> Sequence[Path]:
            if not writes:
                return []
            tokenizer = AutoTokenizer.from_pretrained(str(self._path), local_files_only=True)
            processors = [self._path / name for name in PROCESSORS if (self._path / name).exists()]
            try:
                model.save_pretrained(str(path), state_dict=state, **more)
                if (
                    self._lora is not None and self._lora.merge_on_save
                ):  # transformers has noted that of the frozen weights
                    model.config.dtype = torch.float32
                    model.config.save_pretrained(str(path))
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
        return snapshot(self._model, self._trained(), self._updates, self._strategy.world, self._average)

    def state_digest(self) -> str:
        return state_digest(self._model, self._trained(), self._strategy.world, self._average)

    def restore(self, folder: Path) -> None:
        self._updates = restore(self._model, self._trained(), folder, self._strategy.world, self._average)

    def _trained(self) -> MiniBatchOptimizer:
        if self._optimizer is None:
            raise ConfigError("This policy was built frozen, as a reference; it can't be updated.")
        return self._optimizer

    def _exported(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        """What `export` copies: name for the model that writes it, identity of the parameter, whole
        tensor.
        """
        state = self._model.state_dict(keep_vars=True)
        if self._lora is not None and self._lora.merge_on_save:
            from rl_trainer.backends.peft_lora import base_weights, merged_weights  # needs the extra `lora`

            base = base_weights(state)
            for name, tensor in merged_weights(state, self._lora, full_tensors):
                yield name, id(base[name]), _master(tensor)
            return
        sharded = (
            ((name, id(tensor)), (tensor,)) for name, tensor in state.items() if self._lora is None or ".lora_" in name
        )
        for (name, parameter), (tensor,) in full_tensors(sharded):
            yield name, parameter, tensor

    def _tokens(self, batch: BatchData) -> TokenBatch:
        return token_batch(
            batch,
            self._facts.pad_id,
            packed=self._config.use_remove_padding,
            device=self._strategy.device,
            image_token=self._facts.image_token,
            pieces=self._facts.pieces,
            blank=self._facts.blank(self._strategy.world.size),
            multiple=row_multiple(self._strategy.device),
        )

    def _columns(
        self,
        tokens: TokenBatch,
        temperature: float,
        *,
        squares: bool,
        top: int = 0,
        others: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`log_prob_columns` of the response tokens, and of `others` [T, K] in their places."""
        targets = tokens.targets if others is None else torch.cat([tokens.targets[:, None], others], 1)
        if self._experts is not None:
            self._experts.replay(tokens.routed)
        if self._head is None:
            logits = self._logits(tokens)
            return log_prob_columns(logits, targets, temperature, squares=squares, top=top, kept=tokens.kept)
        places = tokens.line * tokens.inputs["input_ids"].shape[1] + tokens.position
        with self._head.reading(places, targets, temperature, squares=squares, top=top, kept=tokens.kept):
            return self._model(**tokens.inputs, use_cache=False).logits

    def _logits(self, tokens: TokenBatch) -> torch.Tensor:
        """[T, V] logits for each response token.

        A packed model computes no others; a padded one skips the places before the first response
        token.
        """
        if self._config.use_remove_padding:
            return self._model(**tokens.inputs, logits_to_keep=tokens.position, use_cache=False).logits[0]
        width = tokens.inputs["input_ids"].shape[1]
        places = torch.arange(tokens.first, width, device=tokens.position.device)
        out = self._model(**tokens.inputs, logits_to_keep=places, use_cache=False)
        return tokens.read(out.logits, tokens.first)


def _master(tensor: torch.Tensor) -> torch.Tensor:
    """A weight as float32, also one that is frozen in bfloat16."""
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor
