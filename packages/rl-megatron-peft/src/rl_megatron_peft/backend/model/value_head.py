"""The value head, which replaces the output layer in a critic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from rl_megatron_peft.backend.model.gpt import VALUE
from rl_megatron_peft.backend.parallel import Ranks, broadcast_from_stage
from rl_protocol import WeightTensor
from rl_protocol.torch import from_weight


class ValueHead(torch.nn.Module):
    """Maps hidden states to one value per token; has the interface of Megatron's output layers.

    Every tensor-parallel rank holds the whole head and computes all values: the head is small, and
    its gradient is then the same on each rank. It is float32 whatever the dtype of the model, and
    starts at zero, so the first values are 0.
    """

    def __init__(self, hidden: int, device: torch.device, *, sequence_parallel: bool) -> None:
        super().__init__()
        self.add_module(VALUE, torch.nn.Linear(hidden, 1, device=device))
        self._sequence_parallel = sequence_parallel
        for parameter in self.parameters():
            torch.nn.init.zeros_(parameter)

    def forward(
        self, hidden: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        """Return ([tokens, rows, 1] float32, no bias to add later) for [tokens, rows, hidden]."""
        del weight, runtime_gather_output
        if self._sequence_parallel:  # each rank has its own tokens, and their gradient
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return self.get_submodule(VALUE)(hidden.float()), None


def put_value_head(model: GPTModel, ranks: Ranks) -> dict[str, torch.nn.Parameter]:
    """Replace the output layer, which the last stage holds.

    Returns:
        This rank's parameters of the head by their names in the whole model; empty on other stages.
    """
    if not ranks.last:
        return {}
    config: Any = model.config
    head = ValueHead(config.hidden_size, ranks.device, sequence_parallel=config.sequence_parallel)
    model.add_module("output_layer", head)
    return {f"value_head.{name}": parameter for name, parameter in head.get_submodule(VALUE).named_parameters()}


def set_value_head(model: GPTModel, ranks: Ranks, head: Mapping[str, WeightTensor]) -> None:
    """Copy weight [1, hidden] and bias [1] into the head, which the last stage holds; those that
    `head` lacks stay.
    """
    if not ranks.last:
        return
    own = dict(model.get_submodule(f"output_layer.{VALUE}").named_parameters())
    with torch.no_grad():
        for name, tensor in head.items():
            own[name].copy_(from_weight(tensor))


def gather_value_head(model: GPTModel, ranks: Ranks, hidden: int) -> dict[str, torch.Tensor]:
    """Return copies of the head's weight [1, hidden] and bias [1] on every rank; a collective."""
    own = dict(model.get_submodule(f"output_layer.{VALUE}").named_parameters()) if ranks.last else {}
    found: dict[str, torch.Tensor] = {}
    for name, size in {"weight": (1, hidden), "bias": (1,)}.items():
        value = own[name].detach().clone() if ranks.last else torch.empty(size, device=ranks.device)
        found[name] = broadcast_from_stage(value, ranks.layout.pipeline - 1)
    return found
