"""What policy and critic on Megatron-Core have in common: a model over ranks, what of it is trained, and its state."""

from __future__ import annotations

import dataclasses
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from rl_megatron_peft.backend.compat import capabilities, runnable
from rl_megatron_peft.backend.lora import Draw, Lora, attach
from rl_megatron_peft.backend.mapping import MakeMapping, best_mapping
from rl_megatron_peft.backend.model import build_model
from rl_megatron_peft.backend.optimise import AdamConfig, Optimiser, constant
from rl_megatron_peft.backend.parallel import Ranks, from_stage, gather_json
from rl_megatron_peft.backend.passes import run_passes
from rl_megatron_peft.backend.snapshot import restore_snapshot, take_snapshot
from rl_megatron_peft.backend.trained import trained_adapters, trained_weights
from rl_megatron_peft.backend.values import put_value_head
from rl_megatron_peft.base_model import fingerprint
from rl_megatron_peft.config import LoraConfig
from rl_megatron_peft.family import ModelShape
from rl_megatron_peft.writing import new_folder
from rl_protocol import BatchData, OutputError, RaggedColumn


@dataclass(frozen=True, slots=True)
class MiniBatchCounts:
    """Unmasked tokens of a mini-batch over all replicas, and trajectories that have any: what a loss is divided by."""

    tokens: int
    sequences: int


Reported = Mapping[str, tuple[float, float]]
"""Name -> (sum, weight): parts are added up, and the metric is sum / weight."""

Share = Callable[[BatchData, MiniBatchCounts, torch.Tensor], tuple[torch.Tensor, Reported]]
"""(micro-batch, counts of its mini-batch, what the model put out [T, ...]) -> its share of the mini-batch's loss, and what is reported."""

Loss = TypeVar("Loss")


class MegatronLearner(ABC, Generic[Loss]):
    """A model that is trained over Megatron-Core. Every method is called by all ranks of the process group.

    Ranks that share a replica of the model are given the same rows, replicas their own.

    Args:
        path: Hugging Face checkpoint folder of a Llama, Qwen2 or Qwen3 model.
        lora: what is adapted; None: all weights are trained.
        loss: of the trainer.
        ranks: where this process stands, from `rl_megatron_peft.backend.parallel.open_ranks`.
        fused: see `rl_megatron_peft.backend.lora.attach`.
        adam, schedule: see Optimiser.
        mini_batches: (batch, number of the update) -> rows of each of its optimizer steps; None: one step over all rows.
        micro_batch_rows: rows per pass in updates; 0: the whole mini-batch.
        forward_rows: rows per pass when no gradient is needed.
        seed: of fresh adapters and of dropout.
        dtype: of the model and of computation; adapters, a value head, and the optimizer's copy of what it trains, are float32.
        mapping: between `path` and the ranks.
        distributed_optimizer: replicas share the optimizer's state; see Optimiser.

    Raises:
        ConfigError: a model, layout or setting that is not supported; names the field.
    """

    values: ClassVar[bool] = False
    """Whether it puts out values, from a head of its own, in place of logits."""

    def __init__(
        self,
        path: str | Path,
        *,
        lora: LoraConfig | None,
        loss: Loss,
        ranks: Ranks,
        fused: bool = True,
        adam: AdamConfig | None = None,
        schedule: Callable[[int], float] = constant,
        mini_batches: Callable[[BatchData, int], Sequence[Sequence[int]]] | None = None,
        micro_batch_rows: int = 8,
        forward_rows: int = 64,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        mapping: MakeMapping = best_mapping,
        distributed_optimizer: bool = False,
    ) -> None:
        capabilities()
        self.path = Path(path)
        self.lora = lora
        self.fused = fused
        self.shape = ModelShape.read(self.path)
        self.fingerprint = fingerprint(self.path)
        self.ranks = ranks
        self.model = build_model(self.shape, self.ranks, dtype)
        self._mapping = mapping(self.path, self.shape, self.ranks)
        self._mapping.load(self.model)
        trained = list(put_value_head(self.model, ranks)) if self.values else []
        self._draw = Draw()
        self.adapters: list[Lora] = []
        if lora is None:
            tied = self.shape.tied and not self.values  # beside a value head an embedding is no output layer
            trained += trained_weights(self.model, dataclasses.replace(self.shape, tied=tied), ranks)
        else:
            self.adapters = attach(self.model, lora, self.shape, ranks, fused=fused, seed=seed, draw=self._draw)
            trained += trained_adapters(self.adapters)
        self.optimiser = Optimiser(trained, adam or AdamConfig(), ranks, schedule, distributed=distributed_optimizer)
        self._loss = loss
        self._mini_batches = mini_batches
        self._micro_batch_rows = micro_batch_rows
        self._forward_rows = forward_rows
        self._vocab = None if self.values else self.shape.vocab
        self.updates = 0

    def compute(
        self, batch: BatchData, names: Sequence[str], read: Callable[[BatchData, torch.Tensor], torch.Tensor]
    ) -> BatchData:
        """Ragged float32 columns, like the responses, without gradients.

        Args:
            batch: rows that are looked at.
            names: of the columns.
            read: (micro-batch, what the model put out [T, ...]) -> [names, T].
        """
        parts = _micro_batches(batch, range(len(batch)), self._forward_rows)

        def then(number: int, out: torch.Tensor) -> torch.Tensor:
            return read(parts[number], out)

        with torch.no_grad(), runnable():
            found = run_passes(self.model, parts, self._vocab, self.ranks.device, then, train=False)
        responses = batch.ragged("responses")
        tokens = responses.values.shape[0]
        values = torch.cat(found, dim=1) if found else torch.empty(len(names), tokens, device=self.ranks.device)
        values = from_stage(values.contiguous(), self.ranks.layout.pipeline - 1).cpu().numpy()
        return BatchData(
            {
                name: RaggedColumn(row.astype(np.float32), responses.offsets, "float32")
                for name, row in zip(names, values, strict=True)
            }
        )

    def scheduled(self, batch: BatchData) -> Sequence[Sequence[int]]:
        """Rows of each optimizer step of the next update."""
        every = [list(range(len(batch)))] if len(batch) else []
        return self._mini_batches(batch, self.updates) if self._mini_batches else every

    def optimise(self, batch: BatchData, mini_batches: Sequence[Sequence[int]], share: Share) -> dict[str, float]:
        """This replica's part of an update; all replicas call it with equally many mini-batches, of which any may be empty.

        Returns:
            Metrics over all ranks: what `share` reported, `loss`, `grad_norm`, `lr` and `skipped_steps`.
        """
        total: dict[str, tuple[float, float]] = {}
        norms: list[float] = []
        for rows in mini_batches:
            _add(total, self._accumulate(batch, rows, share))
            norms.append(self.optimiser.step())
        self.updates += 1
        finite = [norm for norm in norms if np.isfinite(norm)]
        return {
            **{name: value / weight for name, (value, weight) in total.items() if weight},
            "grad_norm": float(np.mean(finite)) if finite else 0.0,
            "lr": self.optimiser.lr,
            "skipped_steps": float(len(norms) - len(finite)),
        }

    def facts(self) -> dict[str, object]:
        """What a checkpoint and the model that goes on from it must have in common, as JSON."""
        base = f"{self.fingerprint} with a value head" if self.values else self.fingerprint
        if self.lora is None:
            return {"base_model": base, "trained": "all weights"}
        return {
            "base_model": base,
            **self.lora.facts(),
            "fused": self.fused,
        }

    def snapshot(self) -> Callable[[Path], Sequence[Path]]:
        """Copy what training goes on from; see `rl_megatron_peft.backend.snapshot`."""
        return take_snapshot(self.optimiser, self.ranks, self.facts(), self.updates)

    def restore(self, folder: Path) -> None:
        """Take over a snapshot of however many ranks.

        Raises:
            AdapterError: see `rl_megatron_peft.backend.snapshot`.
        """
        self.updates = restore_snapshot(folder, self.optimiser, self.ranks, self.facts()).updates

    def export(self) -> Callable[[Path], Sequence[Path]]:
        """Copy what was trained; the first rank then writes it into an empty folder, with the tokenizer of the base. A collective."""
        write_trained = self._export()

        def write(folder: Path) -> Sequence[Path]:
            return [*write_trained(folder), *self._copy_tokenizer(folder)] if dist.get_rank() == 0 else []

        return write

    def save_pretrained(self, path: Path) -> None:
        """Write what `export` writes as a new folder, whole or not at all; a collective.

        Raises:
            OutputError: on every rank, where the first one could not write.
        """
        write, problem = self.export(), ""
        if dist.get_rank() == 0:
            try:
                new_folder(path, write)
            except OSError as error:
                problem = str(error)
        problem = str(gather_json(problem, self.ranks.device)[0])
        if problem:
            raise OutputError(problem, path=str(path))

    @abstractmethod
    def _export(self) -> Callable[[Path], Sequence[Path]]:
        """Copy what was trained; the first rank calls what is returned to write it, and gets the files."""

    def _copy_tokenizer(self, folder: Path) -> list[Path]:
        return [Path(shutil.copyfile(file, folder / file.name)) for file in sorted(self.path.glob("*token*"))]

    def _merged(self, name: str, parameter: torch.nn.Parameter) -> torch.Tensor:
        module, _, leaf = name.rpartition(".")
        for lora in self.adapters if leaf == "weight" else ():
            if lora.module.name == module:
                return lora.merged(parameter.detach())
        return parameter.detach()

    def _accumulate(self, batch: BatchData, rows: Sequence[int], share: Share) -> dict[str, tuple[float, float]]:
        """Gradients of one mini-batch; returns what was reported on all replicas, and its loss."""
        counts = self._count(batch, rows)
        parts = _micro_batches(batch, rows, self._micro_batch_rows)
        sums: dict[str, tuple[float, float]] = {}

        def then(number: int, out: torch.Tensor) -> torch.Tensor:
            loss, reported = share(parts[number], counts, out)
            _add(sums, {**reported, "loss": (float(loss.detach()), 0.0)})
            return loss

        def begin(number: int) -> None:
            self._draw.pass_name = f"{self.optimiser.steps}/{self.ranks.data}/{number}"

        self.optimiser.zero()
        try:
            with runnable():
                run_passes(self.model, parts, self._vocab, self.ranks.device, then, train=True, begin=begin)
        finally:
            self._draw.pass_name = ""
        total = {"loss": (0.0, 1.0)}
        for found in gather_json(sums if self.ranks.tensor == 0 else {}, self.ranks.device):
            _add(total, found)
        return total

    def _count(self, batch: BatchData, rows: Sequence[int]) -> MiniBatchCounts:
        lengths = [int(row.sum()) for row in batch.select_rows(list(rows)).ragged("response_mask").rows()]
        own = [sum(lengths), sum(length > 0 for length in lengths)]
        counted = self.ranks.tensor == 0 and self.ranks.last
        found = gather_json(own if counted else [0, 0], self.ranks.device)
        return MiniBatchCounts(tokens=sum(f[0] for f in found), sequences=sum(f[1] for f in found))


def _micro_batches(batch: BatchData, rows: Sequence[int], size: int) -> list[BatchData]:
    """Parts of at most `size` rows (0: all), in order."""
    size = size or max(len(rows), 1)
    return [batch.select_rows(list(rows[start : start + size])) for start in range(0, len(rows), size)]


def _add(total: dict[str, tuple[float, float]], more: Reported) -> None:
    for name, (value, weight) in more.items():
        before = total.get(name, (0.0, 0.0))
        total[name] = before[0] + value, before[1] + weight
