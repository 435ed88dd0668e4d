"""The parameters that this rank trains, with their names and shards in the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from megatron.core.models.gpt import GPTModel

from rl_megatron_peft.backend.lora.adapter_layer import LoraLayer
from rl_megatron_peft.backend.model.fused_rows import fuse, unfuse
from rl_megatron_peft.backend.model.gpt import base_parameters
from rl_megatron_peft.backend.parallel import Ranks
from rl_megatron_peft.base_model.experts import ExpertWeight
from rl_megatron_peft.base_model.layout import hf_tensors
from rl_megatron_peft.base_model.model_shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedParameter:
    """A parameter of this rank, and the tensors of the whole model that it holds shards of.

    Attributes:
        parameter: in the dtype of the model.
        keys: names of those tensors, the same under any layout.
        split: dimension in which tensor parallelism splits each of them; None: every rank holds
            all of them.
        partial: every tensor-parallel rank has a part of the gradient, to be summed.
        expert: it belongs to an expert, which expert parallelism keeps on some replicas only.
        unfuse: splits a tensor shaped like the parameter into one per key.
        fuse: the inverse of `unfuse`.
    """

    parameter: torch.nn.Parameter
    keys: tuple[str, ...]
    split: int | None
    partial: bool = False
    expert: bool = False
    unfuse: Callable[[torch.Tensor], Sequence[torch.Tensor]] = lambda tensor: [tensor]
    fuse: Callable[[list[torch.Tensor]], torch.Tensor] = lambda parts: parts[0]


def value_head_parameters(named: Mapping[str, torch.nn.Parameter]) -> Iterator[TrainedParameter]:
    """Yield the parameters of the value head, which every tensor-parallel rank holds completely."""
    for name, parameter in named.items():
        yield TrainedParameter(parameter=parameter, keys=(name,), split=None)


def adapter_parameters(adapters: Sequence[LoraLayer]) -> Iterator[TrainedParameter]:
    """Yield the factors of this stage's adapters."""
    for adapter in adapters:
        for factor in adapter.factors():
            yield TrainedParameter(
                parameter=factor.parameter,
                keys=(factor.key,),
                split=factor.split,
                partial=factor.partial,
                expert=adapter.spec.of_expert,
            )


def model_parameters(model: GPTModel, shape: ModelShape, ranks: Ranks) -> Iterator[TrainedParameter]:
    """Yield all weights of this stage by their checkpoint names, and make them require gradients.

    Raises:
        ConfigError: see Layout.check_whole.
    """
    layout = ranks.layout
    layout.check_whole(shape)
    model.requires_grad_(True)
    for name, parameter in base_parameters(model, shape, ranks):
        held, module = hf_tensors(name, tied=shape.tied), name.split(".")[-2]
        yield TrainedParameter(
            parameter=parameter,
            keys=tuple(tensor.name for tensor in held),
            split=held[0].split,
            partial=module in ("q_layernorm", "k_layernorm")  # each rank has its own heads
            or (layout.sequence_parallel and module.endswith(("layernorm", "router"))),  # and its own tokens
            expert=ExpertWeight.parse(name) is not None,
            unfuse=partial(unfuse, fused=module, shape=shape, tensor=layout.tensor),
            fuse=partial(fuse, fused=module, shape=shape, tensor=layout.tensor),
        )
