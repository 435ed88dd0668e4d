"""The policy under training: a Megatron-Core model, whole or with LoRA adapters, behind the PolicyBackend port."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from rl_megatron_peft.adapter import Adapter, read_adapter, tensors_of, write_files
from rl_megatron_peft.backend.compat import capabilities, runnable
from rl_megatron_peft.backend.exchange import gather_adapter, scatter_adapter
from rl_megatron_peft.backend.lora import Draw, Lora, adapters_off, attach
from rl_megatron_peft.backend.mapping import MakeMapping, best_mapping
from rl_megatron_peft.backend.model import build_model
from rl_megatron_peft.backend.optimise import AdamConfig, Optimiser, constant
from rl_megatron_peft.backend.parallel import Ranks, from_stage, gather_json
from rl_megatron_peft.backend.passes import log_probs, run_passes
from rl_megatron_peft.backend.snapshot import restore_snapshot, take_snapshot
from rl_megatron_peft.backend.trained import trained_adapters, trained_weights
from rl_megatron_peft.backend.whole import write_model
from rl_megatron_peft.base_model import fingerprint
from rl_megatron_peft.config import LoraConfig
from rl_megatron_peft.family import ModelShape
from rl_megatron_peft.writing import new_folder
from rl_protocol import BatchData, ConfigError, OutputError, RaggedColumn, WeightTensor
from rl_protocol.torch import to_weight


@dataclass(frozen=True, slots=True)
class MiniBatchCounts:
    """Unmasked tokens of a mini-batch over all replicas, and trajectories that have any: what a loss is divided by."""

    tokens: int
    sequences: int


Reported = Mapping[str, tuple[float, float]]
"""Name -> (sum, weight): parts are added up, and the metric is sum / weight."""


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


class MegatronPolicyBackend:
    """PolicyBackend over Megatron-Core. Every method is called by all ranks of the process group.

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
        dtype: of the model and of computation; adapters, and the optimizer's copy of what it trains, are float32.
        mapping: between `path` and the ranks.

    Raises:
        ConfigError: a model, layout or setting that is not supported; names the field.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        lora: LoraConfig | None,
        loss: PolicyLoss,
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
        self._draw = Draw()
        self.adapters: list[Lora] = []
        if lora is None:
            trained = trained_weights(self.model, self.shape, ranks)
        else:
            self.adapters = attach(self.model, lora, self.shape, ranks, fused=fused, seed=seed, draw=self._draw)
            trained = trained_adapters(self.adapters)
        self.optimiser = Optimiser(list(trained), adam or AdamConfig(), ranks, schedule)
        self._loss = loss
        self._mini_batches = mini_batches
        self._micro_batch_rows = micro_batch_rows
        self._forward_rows = forward_rows
        self.updates = 0

    def compute_log_probs(self, batch: BatchData, *, temperature: float) -> BatchData:
        """See rl_protocol.ports.PolicyBackend.compute_log_probs."""
        parts = _parts(batch, range(len(batch)), self._forward_rows)

        def read(number: int, logits: torch.Tensor) -> torch.Tensor:
            return torch.stack(log_probs(logits, self._targets(parts[number]), temperature))

        with torch.no_grad(), runnable():
            found = run_passes(self.model, parts, self.shape.vocab, self.ranks.device, read, train=False)
        responses = batch.ragged("responses")
        tokens = responses.values.shape[0]
        values = torch.cat(found, dim=1) if found else torch.empty(2, tokens, device=self.ranks.device)
        values = from_stage(values.contiguous(), self.ranks.layout.pipeline - 1).cpu().numpy()
        return BatchData(
            {
                name: RaggedColumn(row.astype(np.float32), responses.offsets, "float32")
                for name, row in zip(("log_probs", "entropy"), values, strict=True)
            }
        )

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
        every = [list(range(len(batch)))] if len(batch) else []
        mini_batches = self._mini_batches(batch, self.updates) if self._mini_batches else every
        return self.update_share(batch, mini_batches, temperature=temperature)

    def update_share(
        self, batch: BatchData, mini_batches: Sequence[Sequence[int]], *, temperature: float
    ) -> dict[str, float]:
        """This replica's part of an update; all replicas call it with equally many mini-batches, of which any may be empty."""
        total: dict[str, tuple[float, float]] = {}
        norms: list[float] = []
        for rows in mini_batches:
            _add(total, self._accumulate(batch, rows, temperature))
            norms.append(self.optimiser.step())
        self.updates += 1
        finite = [norm for norm in norms if np.isfinite(norm)]
        metrics = {
            **{name: value / weight for name, (value, weight) in total.items() if weight},
            "grad_norm": float(np.mean(finite)) if finite else 0.0,
            "lr": self.optimiser.lr,
            "skipped_steps": float(len(norms) - len(finite)),
        }
        return {name if "/" in name else f"actor/{name}": value for name, value in metrics.items()}

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

    def facts(self) -> dict[str, object]:
        """What a checkpoint and the policy that goes on from it must have in common, as JSON."""
        if self.lora is None:
            return {"base_model": self.fingerprint, "trained": "all weights"}
        return {
            "base_model": self.fingerprint,
            "rank": self.lora.rank,
            "alpha": self.lora.alpha,
            "target_modules": sorted(self.lora.target_modules),
            "exclude": sorted(self.lora.exclude),
            "use_dora": self.lora.use_dora,
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
        """Copy what was trained; the first rank then writes it into an empty folder, with the tokenizer of the base. A collective.

        With LoRA the adapter as PEFT has it, else the model as transformers has it.
        """
        write_trained = self._export()

        def write(folder: Path) -> Sequence[Path]:
            return [*write_trained(folder), *self._copy_tokenizer(folder)] if dist.get_rank() == 0 else []

        return write

    def _export(self) -> Callable[[Path], Sequence[Path]]:
        if self.lora is not None:
            return partial(write_files, adapter=self.adapter())
        writes = dist.get_rank() == 0
        weights = [dataclasses.replace(weight, data=weight.data.copy()) for weight in self.named_weights() if writes]
        return partial(write_model, base=self.path, weights=weights)

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

    def _copy_tokenizer(self, folder: Path) -> list[Path]:
        return [Path(shutil.copyfile(file, folder / file.name)) for file in sorted(self.path.glob("*token*"))]

    def _accumulate(self, batch: BatchData, rows: Sequence[int], temperature: float) -> dict[str, tuple[float, float]]:
        """Gradients of one mini-batch; returns what was reported on all replicas, and its loss."""
        counts = self._count(batch, rows)
        parts = _parts(batch, rows, self._micro_batch_rows)
        sums: dict[str, tuple[float, float]] = {}

        def share(number: int, logits: torch.Tensor) -> torch.Tensor:
            log_prob, entropy = log_probs(logits, self._targets(parts[number]), temperature)
            loss, reported = self._loss(log_prob, entropy, parts[number], counts)
            _add(sums, {**reported, "loss": (float(loss.detach()), 0.0)})
            return loss

        def begin(number: int) -> None:
            self._draw.pass_name = f"{self.optimiser.steps}/{self.ranks.data}/{number}"

        self.optimiser.zero()
        try:
            with runnable():
                run_passes(self.model, parts, self.shape.vocab, self.ranks.device, share, train=True, begin=begin)
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

    def _targets(self, part: BatchData) -> torch.Tensor:
        return torch.tensor(np.asarray(part.ragged("responses").values, np.int64), device=self.ranks.device)

    def _merged(self, name: str, parameter: torch.nn.Parameter) -> torch.Tensor:
        module, _, leaf = name.rpartition(".")
        for lora in self.adapters if leaf == "weight" else ():
            if lora.module.name == module:
                return lora.merged(parameter.detach())
        return parameter.detach()


def _parts(batch: BatchData, rows: Sequence[int], size: int) -> list[BatchData]:
    """Micro-batches of at most `size` rows (0: all), in order."""
    size = size or max(len(rows), 1)
    return [batch.select_rows(list(rows[start : start + size])) for start in range(0, len(rows), size)]


def _add(total: dict[str, tuple[float, float]], more: Reported) -> None:
    for name, (value, weight) in more.items():
        before = total.get(name, (0.0, 0.0))
        total[name] = before[0] + value, before[1] + weight
