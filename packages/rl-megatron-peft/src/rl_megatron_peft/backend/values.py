"""The value head: what a critic has in place of the output layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from rl_megatron_peft.backend.model import VALUE
from rl_megatron_peft.backend.parallel import Ranks, from_stage
from rl_megatron_peft.backend.trained import Trained


class ValueHead(torch.nn.Module):
    """Hidden states -> one value per place; called as Megatron's output layers are.

    Every tensor-parallel rank has all of it and computes all values: it is small, and gradients are then the same on each. It is float32
    whatever the model computes in, and starts at 0, so that first values are 0.
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
        """([places, rows, 1] float32, no bias to be added) for [places, rows, hidden]; the weight of a tied embedding is not used."""
        del weight, runtime_gather_output
        if self._sequence_parallel:  # each rank has places of its own; what comes back to it is theirs alone
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return self.get_submodule(VALUE)(hidden.float()), None


def put_value_head(model: GPTModel, ranks: Ranks) -> Iterator[Trained]:
    """Replace the output layer, which is on the last stage; what of the head this rank trains."""
    if not ranks.last:
        return
    config: Any = model.config
    head = ValueHead(config.hidden_size, ranks.device, sequence_parallel=config.sequence_parallel)
    model.add_module("output_layer", head)
    for name, parameter in head.get_submodule(VALUE).named_parameters():
        yield Trained(parameter=parameter, keys=(f"value_head.{name}",), split=None)


def value_head(model: GPTModel, ranks: Ranks, hidden: int) -> dict[str, torch.Tensor]:
    """Copies of the head's weight [1, hidden] and bias [1], on every rank; a collective over the stages."""
    own = dict(model.get_submodule(f"output_layer.{VALUE}").named_parameters()) if ranks.last else {}
    found: dict[str, torch.Tensor] = {}
    for name, size in {"weight": (1, hidden), "bias": (1,)}.items():
        value = own[name].detach().clone() if ranks.last else torch.empty(size, device=ranks.device)
        found[name] = from_stage(value, ranks.layout.pipeline - 1)
    return found
