"""What an optimizer trains on this rank: factors of adapters, or all weights of its stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from megatron.core.models.gpt import GPTModel

from rl_megatron_peft.backend.lora import Lora
from rl_megatron_peft.backend.model import base_parameters, fuse, unfuse
from rl_megatron_peft.backend.parallel import Ranks
from rl_megatron_peft.family import ModelShape
from rl_megatron_peft.layout import held_tensors
from rl_protocol.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """One parameter of this rank, and the tensors of the whole model that it holds parts of.

    Attributes:
        parameter: in the type that the model computes in.
        keys: names of those tensors in the whole model, the same under any layout.
        split: dimension that tensor parallelism cuts in each of them; None: every rank has the whole.
        partial: every tensor-parallel rank has a share of its gradient.
        apart, joined: something shaped like the parameter -> its parts, by key; and back.
    """

    parameter: torch.nn.Parameter
    keys: tuple[str, ...]
    split: int | None
    partial: bool = False
    apart: Callable[[torch.Tensor], Sequence[torch.Tensor]] = lambda tensor: [tensor]
    joined: Callable[[list[torch.Tensor]], torch.Tensor] = lambda parts: parts[0]


def trained_adapters(adapters: Sequence[Lora]) -> Iterator[Trained]:
    """The factors of this stage's adapters."""
    for lora in adapters:
        for factor in lora.factors():
            yield Trained(parameter=factor.parameter, keys=(factor.key,), split=factor.split, partial=factor.partial)


def trained_weights(model: GPTModel, shape: ModelShape, ranks: Ranks) -> Iterator[Trained]:
    """All weights of this stage, by their names in the Hugging Face checkpoint; they want gradients from now on.

    Raises:
        ConfigError: a layout under which copies of the embedding, or rows that pad it, would have to be kept the same.
    """
    layout = ranks.layout
    if shape.tied and layout.pipeline > 1:
        raise ConfigError(
            f"Training all weights of a model whose output layer is its embedding needs them in one stage; got pipeline={layout.pipeline}. "
            "Set pipeline=1, or train adapters.",
            field="pipeline",
        )
    if shape.vocab % layout.tensor:
        raise ConfigError(
            f"Training all weights needs a vocabulary that its ranks divide; got {shape.vocab} for tensor={layout.tensor}. Choose a divisor, or "
            "train adapters.",
            field="tensor",
        )
    model.requires_grad_(True)
    for name, parameter in base_parameters(model, shape, ranks):
        held, fused = held_tensors(name, tied=shape.tied), name.split(".")[-2]
        yield Trained(
            parameter=parameter,
            keys=tuple(tensor.name for tensor in held),
            split=held[0].split,
            partial=fused in ("q_layernorm", "k_layernorm")  # of this rank's heads
            or (layout.sequence_parallel and fused.endswith("layernorm")),  # of this rank's tokens
            apart=partial(unfuse, fused=fused, shape=shape, tensor=layout.tensor),
            joined=partial(fuse, fused=fused, shape=shape, tensor=layout.tensor),
        )
