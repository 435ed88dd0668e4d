"""Dropout of adapter inputs, reproducible under any layout and after a resume."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch

from rl_megatron_peft.backend.lora.adapter_spec import AdapterSpec
from rl_megatron_peft.backend.parallel import Ranks


@dataclass(slots=True)
class DropoutContext:
    """The training pass under way, shared by the adapters of a stage.

    A mask depends only on (seed, pass, layer), so it is the same under any layout of tensors and
    stages and after a resume; there is no random state to save.

    Attributes:
        pass_name: name of the training pass; empty: nothing is dropped.
    """

    pass_name: str = ""


class InputDropout:
    """Drops inputs of one layer's adapter.

    Logical modules that Megatron fuses share a mask, also if each has its own A.

    Args:
        probability: of zeroing an input; the others are scaled to keep the mean.
        seed: seed of the run.
        context: names the training pass.
        spec: the adapter.
        ranks: place of this process.
    """

    def __init__(self, probability: float, seed: int, context: DropoutContext, spec: AdapterSpec, ranks: Ranks) -> None:
        self._probability = probability
        self._seed = seed
        self._context = context
        self._layer = spec.module.name
        self._dim = 0 if spec.sequence_parallel and not spec.row_parallel else -1
        sharded = spec.row_parallel or spec.sequence_parallel  # by inputs or by tokens
        self._shard, self._shards = (ranks.tensor, ranks.layout.tensor) if sharded else (0, 1)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x with inputs dropped, or x itself outside training passes."""
        return x * self._mask(x) if self._probability and self._context.pass_name else x

    def _mask(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the mask, which is drawn for all ranks at once."""
        size = list(x.shape)
        size[self._dim] *= self._shards
        generator = named_generator(f"{self._seed}/{self._context.pass_name}/{self._layer}", x.device)
        drawn = torch.rand(size, generator=generator, device=x.device)
        kept = drawn.chunk(self._shards, dim=self._dim)[self._shard] >= self._probability
        return kept.to(x.dtype) / (1 - self._probability)


def named_generator(name: str, device: torch.device | None = None) -> torch.Generator:
    """Return a generator seeded with a name."""
    return torch.Generator(device or "cpu").manual_seed(zlib.crc32(name.encode()))
