"""Between a Hugging Face checkpoint and the ranks of a Megatron-Core model: one interface, our own mapping and that of Megatron-Bridge."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from megatron.core.models.gpt import GPTModel

from rl_megatron_peft.backend.bridge import BridgeMapping, bridge_problem
from rl_megatron_peft.backend.model import base_weights, load_base
from rl_megatron_peft.backend.parallel import Ranks
from rl_megatron_peft.family import ModelShape

logger = logging.getLogger(__name__)

Read = Callable[[str, torch.nn.Parameter], torch.Tensor]
"""(parameter, numbered as in the whole model, and what it holds here) -> what to export in its place, such as a weight with its adapter merged in."""


class WeightMapping(Protocol):
    """Both methods are collectives over the ranks that share the model."""

    def load(self, model: GPTModel) -> None:
        """Fill this rank's parameters from the checkpoint; those of adapters stay as they are."""
        ...

    def weights(self, model: GPTModel, read: Read) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the checkpoint, whole, on every rank, by its name there; all ranks go through it, from beginning to end."""
        ...


MakeMapping = Callable[[Path, ModelShape, Ranks], WeightMapping]
"""(Hugging Face folder, what it holds, where this process stands) -> its mapping."""


@dataclass(frozen=True, slots=True)
class OwnMapping:
    """Reads of each tensor what this rank holds, and nothing else; `rl_megatron_peft.layout` says where that is."""

    folder: Path
    shape: ModelShape
    ranks: Ranks

    def load(self, model: GPTModel) -> None:
        """See WeightMapping."""
        load_base(model, self.folder, self.shape, self.ranks)

    def weights(self, model: GPTModel, read: Read) -> Iterator[tuple[str, torch.Tensor]]:
        """See WeightMapping."""
        return base_weights(model, self.shape, self.ranks, read)


def best_mapping(folder: Path, shape: ModelShape, ranks: Ranks) -> WeightMapping:
    """That of Megatron-Bridge where it is installed and can hold the model, and our own elsewhere; they agree bit for bit."""
    problem = bridge_problem(shape, ranks.layout)
    if not problem:
        return BridgeMapping(folder, shape, ranks)
    logger.info("Our own mapping of weights is used: %s", problem)
    return OwnMapping(folder, shape, ranks)
