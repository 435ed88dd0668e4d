"""LoRA on the experts of a model, whose weights transformers holds in one parameter of a layer.

    gate_up_proj [experts, 2 * inner, hidden]   gate_proj and up_proj of each expert
    down_proj    [experts, hidden, inner]       down_proj of each expert

peft adapts such a parameter (its `target_parameters`, class ParamWrapper) by factors of every
expert in one matrix each: A [experts * rank, in] and B [out, rank * experts]. It wraps the module
of the experts once for each of its parameters, in their order, the first innermost.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

import torch

from rl_trainer.config.lora import EXPERT_PARAMETERS, LoraConfig

_WRAPPER = re.compile(r"\.base_layer(?=\.)")


def plain_name(name: str) -> str:
    """The name of a weight without the wrappers that peft put around its module.

    >>> plain_name("layers.0.mlp.experts.base_layer.base_layer.down_proj")
    'layers.0.mlp.experts.down_proj'
    """
    return _WRAPPER.sub("", name)


def adapted_experts(shapes: Iterable[tuple[str, tuple[int, ...]]], config: LoraConfig) -> dict[str, str]:
    """Find the parameters of experts that get an adapter.

    Args:
        shapes: (plain name, shape) of the parameters of a model, in its order.
        config: settings of the adapters.

    Returns:
        Name of each parameter -> the module of its factors `lora_A` and `lora_B`.

    Raises:
        ConfigError: a part of a parameter is a target, and another is not.
    """
    found: dict[str, list[str]] = defaultdict(list)
    for name, shape in shapes:
        module, _, last = name.rpartition(".")
        if len(shape) == 3 and last in EXPERT_PARAMETERS and config.covers_weight(name):
            found[module].append(name)
    return {
        name: module + ".base_layer" * (len(names) - 1 - place)
        for module, names in found.items()
        for place, name in enumerate(names)
    }


def factor_shapes(shape: tuple[int, ...], rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of A and B for a parameter [experts, out, in]."""
    experts, out, inner = shape
    return (experts * rank, inner), (out, rank * experts)


def expert_delta(a: torch.Tensor, b: torch.Tensor, experts: int) -> torch.Tensor:
    """B A of each expert [experts, out, in], for A and B in the shapes of `factor_shapes`."""
    return torch.einsum("ore,eri->eoi", b.reshape(len(b), -1, experts), a.reshape(experts, -1, a.shape[-1]))
