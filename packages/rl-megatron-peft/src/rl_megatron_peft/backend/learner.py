"""What the policy and critic backends share: the model over ranks, its updates and its state."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from rl_megatron_peft.backend.capabilities import capabilities
from rl_megatron_peft.backend.cpu_shims import runnable
from rl_megatron_peft.backend.io.hf_export import copy_tokenizer
from rl_megatron_peft.backend.io.snapshot import own_tensors, restore_snapshot, take_snapshot
from rl_megatron_peft.backend.lora.adapter_layer import LoraLayer
from rl_megatron_peft.backend.lora.attach import attach
from rl_megatron_peft.backend.lora.dropout import DropoutContext
from rl_megatron_peft.backend.lora.gather_adapter import scatter_adapter
from rl_megatron_peft.backend.model.expert_replay import ExpertReplay
from rl_megatron_peft.backend.model.gpt import build_model
from rl_megatron_peft.backend.model.value_head import put_value_head
from rl_megatron_peft.backend.model.weight_mapping import MakeMapping, best_mapping
from rl_megatron_peft.backend.parallel import (
    Ranks,
    all_gather_json,
    broadcast_from_stage,
    longest_of_expert_ranks,
    on_first_rank,
    ranks_of_replica,
)
from rl_megatron_peft.backend.train.forward_backward import Stage, run_passes
from rl_megatron_peft.backend.train.mini_batches import (
    MetricSums,
    MiniBatchCounts,
    add_sums,
    count_tokens,
    forward_rows_of,
    micro_batches_of,
)
from rl_megatron_peft.backend.train.optimizer import Optimizer
from rl_megatron_peft.backend.train.param_groups import (
    TrainedParameter,
    adapter_parameters,
    model_parameters,
    value_head_parameters,
)
from rl_megatron_peft.backend.train.settings import TrainSettings
from rl_megatron_peft.base_model.fingerprint import fingerprint
from rl_megatron_peft.base_model.model_shape import ModelShape
from rl_megatron_peft.peft.adapter_folder import read_adapter
from rl_megatron_peft.peft.checkpoint_folders import new_folder
from rl_megatron_peft.peft.lora_config import LoraConfig
from rl_protocol import BatchData, ConfigError, RaggedColumn
from rl_protocol.torch import tensor_digest

OutputLoss = Callable[[BatchData, MiniBatchCounts, torch.Tensor], tuple[torch.Tensor, MetricSums]]
"""(micro-batch, counts of its mini-batch, model output [T, ...]) -> share of the loss, metrics."""

ReadColumns = Callable[[BatchData, torch.Tensor], torch.Tensor]
"""(micro-batch, model output [T, ...]) -> values of the columns to compute [columns, T]."""

LossFn = TypeVar("LossFn")


class MegatronLearner(ABC, Generic[LossFn]):
    """A model trained with Megatron-Core. Every method is called by all ranks of the process group.

    Ranks of one data-parallel replica pass the same rows, each replica its own. With `replicas`
    (`rl_protocol.bridge.ReplicaOfRanks`) one of these ranks fetches rows for all.

    Args:
        path: Hugging Face checkpoint folder of a Llama, Qwen2, Qwen3 or Qwen3-MoE model.
        lora: settings of the adapters; None: all weights are trained.
        loss: the trainer's loss.
        ranks: place of this process, from `rl_megatron_peft.backend.parallel.open_ranks`.
        settings: how the model is trained.
        mapping: maps the weights in `path` to the ranks.
        frozen: the model is a reference: updates are refused, and no optimizer is built.

    Raises:
        ConfigError: a model, layout or setting is not supported; names the field.
    """

    has_value_head: ClassVar[bool] = False
    """Whether the model outputs values instead of logits."""

    def __init__(
        self,
        path: str | Path,
        *,
        lora: LoraConfig | None,
        loss: LossFn,
        ranks: Ranks,
        settings: TrainSettings | None = None,
        mapping: MakeMapping = best_mapping,
        frozen: bool = False,
    ) -> None:
        capabilities()
        self.settings = TrainSettings() if settings is None else settings
        self.path = Path(path)
        self.lora = lora
        self.shape = ModelShape.read(self.path)
        self.fingerprint = fingerprint(self.path)
        self.ranks = ranks
        self.replicas = ranks_of_replica()
        self.model = build_model(self.shape, ranks, self.settings.dtype)
        replays = self.shape.experts and not self.has_value_head
        self._experts = ExpertReplay(self.model, self.shape, ranks) if replays else None
        self.adapters: list[LoraLayer] = []
        self._adapter_of: dict[str, LoraLayer] = {}
        self.updates = 0
        self._loss = loss
        self._mapping = mapping(self.path, self.shape, ranks)
        self._mapping.load(self.model)
        self._dropout_context = DropoutContext()
        self._stage = Stage(
            self.model,
            ranks.device,
            vocab=None if self.has_value_head else self.shape.vocab,
            set_experts=None if self._experts is None else self._experts.set,
        )
        trained, settings = self._make_trainable(), self.settings
        self._optimizer = (
            None
            if frozen
            else Optimizer(
                trained, settings.adam, ranks, settings.lr_schedule, distributed=settings.distributed_optimizer
            )
        )

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer.

        Raises:
            ConfigError: the model is frozen, so it has none.
        """
        if self._optimizer is None:
            raise ConfigError("This model was built frozen, as a reference; it can't be updated.", field="frozen")
        return self._optimizer

    # -- computing

    def compute_columns(
        self, batch: BatchData, names: Sequence[str], read_columns: ReadColumns, *, experts: bool = False
    ) -> BatchData:
        """Compute ragged float32 columns with the lengths of the responses, without gradients.

        Args:
            batch: the rows.
            names: names of the columns.
            read_columns: computes the columns of a micro-batch from the output of the model.
            experts: also return the experts of each token, ROUTED_COLUMNS.

        Raises:
            ConfigError: there are to be experts, and the model has none.
        """
        size = forward_rows_of(batch, self.settings.forward_rows, self.settings.micro_batch_tokens)
        micro_batches = micro_batches_of(batch, range(len(batch)), size)
        recorder, used = self._recorder() if experts else None, list[torch.Tensor]()

        def read_output(number: int, output: torch.Tensor) -> torch.Tensor:
            return read_columns(micro_batches[number], output)

        with torch.no_grad(), runnable():
            found = run_passes(
                self._stage,
                micro_batches,
                read_output,
                train=False,
                after_pass=None if recorder is None else lambda: used.append(recorder.used()),
                passes=longest_of_expert_ranks(len(micro_batches), self.ranks.device),
            )
        routed = {} if recorder is None else recorder.columns(micro_batches, used)
        responses = batch.ragged("responses")
        tokens = responses.values.shape[0]
        values = torch.cat(found, dim=1) if found else torch.empty(len(names), tokens, device=self.ranks.device)
        values = broadcast_from_stage(values.contiguous(), self.ranks.layout.pipeline - 1).cpu().numpy()
        made = {
            name: RaggedColumn(row.astype(np.float32), responses.offsets, "float32")
            for name, row in zip(names, values, strict=True)
        }
        return BatchData({**made, **routed})

    def _recorder(self) -> ExpertReplay:
        if self._experts is None:
            raise ConfigError(
                f"TrainSettings.records_experts needs a model with experts; the one in {self.path} has none.",
                field="records_experts",
            )
        return self._experts

    # -- training

    def mini_batches(self, batch: BatchData) -> Sequence[Sequence[int]]:
        """Return the rows of each optimizer step of the next update."""
        if self.settings.mini_batches is not None:
            return self.settings.mini_batches(batch, self.updates)
        return [list(range(len(batch)))] if len(batch) else []

    def run_update(
        self, batch: BatchData, mini_batches: Sequence[Sequence[int]], output_loss: OutputLoss
    ) -> dict[str, float]:
        """Run this replica's part of an update.

        All replicas pass equally many mini-batches, any of which may be empty.

        Returns:
            Metrics over all ranks: those of `output_loss`, and `loss`, `grad_norm` (the mean of
            those that are finite; NaN if none is, 0 without mini-batches), `lr` and
            `skipped_steps`.
        """
        total: dict[str, tuple[float, float]] = {}
        norms: list[float] = []
        for rows in mini_batches:
            add_sums(total, self._accumulate(batch, rows, output_loss))
            norms.append(self.optimizer.step())
        self.updates += 1
        finite = [norm for norm in norms if np.isfinite(norm)]
        no_norm = np.nan if norms else 0.0
        return {
            **{name: value / weight for name, (value, weight) in total.items() if weight},
            "grad_norm": float(np.mean(finite)) if finite else no_norm,
            "lr": self.optimizer.lr,
            "skipped_steps": float(len(norms) - len(finite)),
        }

    def _make_trainable(self) -> list[TrainedParameter]:
        """Add value head and adapters, and return what is trained."""
        head = put_value_head(self.model, self.ranks) if self.has_value_head else {}
        trained = list(value_head_parameters(head))
        if self.lora is None:
            # with a value head the embedding is not tied to an output layer
            tied = self.shape.tied and not self.has_value_head
            return trained + list(model_parameters(self.model, dataclasses.replace(self.shape, tied=tied), self.ranks))
        self.adapters = attach(
            self.model,
            self.lora,
            self.shape,
            self.ranks,
            fused=self.settings.fused,
            seed=self.settings.seed,
            dropout_context=self._dropout_context,
        )
        self._adapter_of = {adapter.spec.module.name: adapter for adapter in self.adapters}
        return trained + list(adapter_parameters(self.adapters))

    def _accumulate(
        self, batch: BatchData, rows: Sequence[int], output_loss: OutputLoss
    ) -> dict[str, tuple[float, float]]:
        """Compute the gradients of a mini-batch; return metrics and loss over all replicas."""
        counts = count_tokens(batch, rows, self.ranks)
        settings = self.settings
        micro_batches = micro_batches_of(batch, rows, settings.micro_batch_rows, settings.micro_batch_tokens)
        sums: dict[str, tuple[float, float]] = {}

        def loss_of(number: int, output: torch.Tensor) -> torch.Tensor:
            loss, metrics = output_loss(micro_batches[number], counts, output)
            add_sums(sums, {**metrics, "loss": (float(loss.detach()), 0.0)})
            return loss

        def name_pass(number: int) -> None:
            self._dropout_context.pass_name = f"{self.optimizer.steps}/{self.ranks.data}/{number}"

        self.optimizer.zero_grad()
        try:
            with runnable():
                run_passes(
                    self._stage,
                    micro_batches,
                    loss_of,
                    train=True,
                    before_pass=name_pass,
                    passes=longest_of_expert_ranks(len(micro_batches), self.ranks.device),
                )
        finally:
            self._dropout_context.pass_name = ""
        total = {"loss": (0.0, 1.0)}
        for found in all_gather_json(sums if self.ranks.tensor == 0 else {}, self.ranks.device):
            add_sums(total, found)
        return total

    # -- state

    def manifest_fields(self) -> dict[str, object]:
        """Return the fields that must be equal in a checkpoint and in the model that loads it."""
        base = f"{self.fingerprint} with a value head" if self.has_value_head else self.fingerprint
        if self.lora is None:
            return {"base_model": base, "trained": "all weights"}
        return {"base_model": base, **self.lora.manifest_fields(), "fused": self.settings.fused}

    def snapshot(self) -> Callable[[Path], Sequence[Path]]:
        """Copy the training state; see `rl_megatron_peft.backend.io.snapshot.take_snapshot`."""
        return take_snapshot(self.optimizer, self.ranks, self.manifest_fields(), self.updates)

    def state_digest(self) -> str:
        """SHA-256 of the trained tensors and moments that this rank would write."""
        return tensor_digest(own_tensors(self.optimizer, self.ranks))

    def restore(self, folder: Path) -> None:
        """Restore a snapshot, which may have been taken under another layout.

        Raises:
            AdapterError: it belongs to another model or can't be read; names file and field.
        """
        self.updates = restore_snapshot(folder, self.optimizer, self.ranks, self.manifest_fields()).updates

    def export(self) -> Callable[[Path], Sequence[Path]]:
        """Copy what was trained; a collective.

        Returns:
            A function that writes it with the tokenizer of the base model into an empty folder, and
            returns the files. Only the first rank writes.
        """
        write_trained = self._export()

        def write(folder: Path) -> Sequence[Path]:
            return [*write_trained(folder), *copy_tokenizer(self.path, folder)] if dist.get_rank() == 0 else []

        return write

    def save_pretrained(self, path: Path) -> None:
        """Write what `export` copies into a new folder, which appears complete or not at all.

        Raises:
            OutputError: the folder can't be written.
        """
        write = self.export()
        on_first_rank(lambda: new_folder(path, write), path, self.ranks.device)

    def load_adapter(self, path: Path) -> None:
        """Load the adapter of a PEFT folder; the optimizer state is not changed.

        Raises:
            AdapterError: it is damaged, or differs from this model in base model or settings;
                names file and field. Nothing is changed.
            ConfigError: the model has no LoRA.
        """
        lora = self._require_lora()
        scatter_adapter(
            read_adapter(path, value_head=self.has_value_head),
            self.adapters,
            lora,
            self.shape,
            self.ranks,
            fused=self.settings.fused,
            fingerprint=self.fingerprint,
            source=str(path),
        )

    def _require_lora(self) -> LoraConfig:
        if self.lora is None:
            raise ConfigError(
                "All weights of this model are trained: it has no adapter and no copy of its first weights. Set a LoraConfig.",
                field="lora",
            )
        return self.lora

    @abstractmethod
    def _export(self) -> Callable[[Path], Sequence[Path]]:
        """Copy what was trained and return a function by which the first rank writes it."""

    def _merged(self, name: str, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return a base parameter with its adapter merged in."""
        module, _, leaf = name.rpartition(".")
        adapter = self._adapter_of.get(module) if leaf == "weight" else None
        return parameter.detach() if adapter is None else adapter.merged(parameter.detach())
