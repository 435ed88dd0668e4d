"""Loads a Hugging Face checkpoint into the ranks of a Megatron-Core model, and exports it again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import safetensors
import torch
from megatron.core.models.gpt import GPTModel

from rl_megatron_peft.backend.model.fused_rows import fuse, unfuse
from rl_megatron_peft.backend.model.gpt import base_parameters
from rl_megatron_peft.backend.model.megatron_bridge import BridgeMapping, bridge_problem
from rl_megatron_peft.backend.parallel import (
    Ranks,
    all_gather_tensor_parallel,
    broadcast_from_expert_rank,
    broadcast_from_stage,
)
from rl_megatron_peft.base_model.experts import expert_of
from rl_megatron_peft.base_model.layout import hf_tensors
from rl_megatron_peft.base_model.model_shape import ModelShape
from rl_protocol.errors import ConfigError
from rl_protocol.support.hf_checkpoint import safetensors_files

logger = logging.getLogger(__name__)

ExportedValue = Callable[[str, torch.nn.Parameter], torch.Tensor]
"""(global name, parameter of this rank) -> the tensor to export, such as the merged weight."""


class WeightMapping(Protocol):
    """Converts weights between a checkpoint and the parameters of all ranks.

    Both methods are collectives over the ranks that share a replica of the model, experts included.
    """

    def load(self, model: GPTModel) -> None:
        """Fill this rank's parameters from the checkpoint, except those of adapters."""
        ...

    def weights(self, model: GPTModel, exported_value: ExportedValue) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor of the checkpoint, complete and on every rank, by its name there.

        All ranks must exhaust the iterator.
        """
        ...


MakeMapping = Callable[[Path, ModelShape, Ranks], WeightMapping]
"""(Hugging Face folder, its shape, ranks) -> its mapping."""


class HFCheckpoint:
    """Reads slices of the tensors in a Hugging Face checkpoint folder. Use as a context manager.

    Raises:
        ConfigError: a file is missing or damaged, or a tensor is missing or has another shape;
            names file and tensor.
    """

    def __init__(self, folder: Path, shape: ModelShape) -> None:
        self._folder = folder
        self._shapes = shape.tensors()
        self._stack = ExitStack()
        self._file_of: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> HFCheckpoint:
        for file in safetensors_files(self._folder):
            try:
                opened = self._stack.enter_context(safetensors.safe_open(file, framework="pt"))
            except (OSError, safetensors.SafetensorError) as error:
                raise ConfigError(f"{file}: file can't be read as safetensors: {error}.", field=str(file)) from error
            self._open[file] = opened
            self._file_of |= dict.fromkeys(opened.keys(), file)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def shard(self, name: str, split: int | None, rank: int, of: int, rows: int | None = None) -> torch.Tensor:
        """Read shard `rank` of `of` of a tensor split in dimension `split`.

        `rows` pads dimension 0 with zeros before it is split.
        """
        file = self._file_of.get(name)
        if file is None:
            raise ConfigError(f"{self._folder}: {name} is in none of its safetensors files.", field=name)
        piece = self._open[file].get_slice(name)
        found = tuple(piece.get_shape())
        if found != self._shapes[name]:
            raise ConfigError(
                f"{file}: {name} has shape {found}; config.json makes it {self._shapes[name]}.", field=name
            )
        if split is None:
            return piece[:]
        size = (rows or found[split]) // of
        begin, end = rank * size, (rank + 1) * size
        if split == 1:
            return piece[:, begin:end]
        part = piece[min(begin, found[0]) : min(end, found[0])]
        missing = size - part.shape[0]
        return torch.cat([part, part.new_zeros(missing, *part.shape[1:])]) if missing else part


@dataclass(frozen=True, slots=True)
class OwnMapping:
    """WeightMapping of this package; each rank reads only its shards."""

    folder: Path
    shape: ModelShape
    ranks: Ranks

    def load(self, model: GPTModel) -> None:
        tensor, vocab = self.ranks.layout.tensor, self.ranks.layout.padded_vocab(self.shape)
        with HFCheckpoint(self.folder, self.shape) as checkpoint, torch.no_grad():
            for name, parameter in base_parameters(model, self.shape, self.ranks):
                rows = vocab if name.endswith(("word_embeddings.weight", "output_layer.weight")) else None
                held = hf_tensors(name, tied=self.shape.tied)
                parts = [checkpoint.shard(part.name, part.split, self.ranks.tensor, tensor, rows) for part in held]
                parameter.copy_(fuse(parts, _fused_name(name), self.shape, tensor))

    def weights(self, model: GPTModel, exported_value: ExportedValue) -> Iterator[tuple[str, torch.Tensor]]:
        shape, ranks = self.shape, self.ranks
        parameters = dict(base_parameters(model, shape, ranks))
        holder = {
            part.name: (name, i, part.split)
            for name in parameters
            for i, part in enumerate(hf_tensors(name, tied=shape.tied))
        }
        dtype = next(iter(parameters.values())).dtype
        for hf_name, size in shape.tensors().items():
            stage, expert = ranks.layout.stage(hf_name, shape), expert_of(hf_name)
            expert_rank = None if expert is None else ranks.layout.expert_rank(expert, shape)
            if stage == ranks.pipeline and expert_rank in (None, ranks.expert):
                name, part, split = holder[hf_name]
                value = exported_value(name, parameters[name])
                shard = unfuse(value, _fused_name(name), shape, ranks.layout.tensor)[part]
                whole = all_gather_tensor_parallel(shard, split)[: size[0]].contiguous()
            else:
                whole = torch.empty(size, dtype=dtype, device=ranks.device)
            if expert_rank is not None and stage == ranks.pipeline:
                broadcast_from_expert_rank(whole, expert_rank)
            yield hf_name, broadcast_from_stage(whole, stage)


def best_mapping(folder: Path, shape: ModelShape, ranks: Ranks) -> WeightMapping:
    """Return Megatron-Bridge's mapping if it is installed and supports the model, else OwnMapping.

    Their results are bit-equal.
    """
    problem = bridge_problem(shape, ranks.layout)
    if not problem:
        return BridgeMapping(folder, shape, ranks)
    logger.info("Megatron-Bridge is not used to map weights: %s", problem)
    return OwnMapping(folder, shape, ranks)


def _fused_name(parameter: str) -> str:
    return parameter.split(".")[-2]
