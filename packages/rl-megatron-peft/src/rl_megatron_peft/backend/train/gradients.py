"""The gradients of a rank in one float32 tensor, and their sum over data-parallel replicas.

Gradients of experts come last; they are summed over the replicas of the same experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rl_megatron_peft.backend.parallel import all_reduce_data_parallel, all_reduce_expert_replicas, reduce_to_replica
from rl_megatron_peft.backend.train.param_groups import TrainedParameter


class Gradients:
    """Accumulates gradients over micro-batches. Those with the same owner are contiguous.

    Attributes:
        parts: the gradient of each parameter, a view of the flat tensor.

    Args:
        trained: the parameters.
        owners: replica that holds the optimizer state of each parameter; None: every replica does.
        device: device of the parameters.
    """

    def __init__(self, trained: Sequence[TrainedParameter], owners: Sequence[int] | None, device: torch.device) -> None:
        self.parts: list[torch.Tensor] = []
        self._parameters = [one.parameter for one in trained]
        self._owners = owners
        self._experts = [one.expert for one in trained]
        self._device = device
        self._flat: torch.Tensor | None = None  # allocated by the first update
        for number, parameter in enumerate(self._parameters):
            if parameter.dtype != torch.float32:
                parameter.register_post_accumulate_grad_hook(self._adder(number))

    def zero(self) -> None:
        """Set the gradients to zero; backward passes then add to `parts`."""
        if self._flat is None:
            self._allocate()
        assert self._flat is not None
        self._flat.zero_()
        for parameter, part in zip(self._parameters, self.parts, strict=True):
            if parameter.dtype == torch.float32:
                parameter.grad = part

    def reduce(self) -> None:
        """Sum over replicas. Each gradient is defined only on the owners of its optimizer state."""
        assert self._flat is not None
        if self._owners is None:
            dense = sum(
                part.numel() for part, of_expert in zip(self.parts, self._experts, strict=True) if not of_expert
            )
            all_reduce_data_parallel(self._flat[:dense])
            all_reduce_expert_replicas(self._flat[dense:])
            return
        begin = 0
        for replica in sorted(set(self._owners)):
            numbers = [number for number, owner in enumerate(self._owners) if owner == replica]
            end = begin + sum(self.parts[number].numel() for number in numbers)
            reduce_to_replica(self._flat[begin:end], replica)
            begin = end

    def _allocate(self) -> None:
        sizes = [parameter.numel() for parameter in self._parameters]
        owners = self._owners
        experts = self._experts
        order = sorted(range(len(sizes)), key=lambda number: (owners[number] if owners else experts[number], number))
        self._flat = torch.empty(sum(sizes), device=self._device)
        begins, begin = dict[int, int](), 0
        for number in order:
            begins[number] = begin
            begin += sizes[number]
        self.parts = [
            self._flat[begins[number] : begins[number] + parameter.numel()].view_as(parameter)
            for number, parameter in enumerate(self._parameters)
        ]

    def _adder(self, number: int) -> Callable[[torch.Tensor], None]:
        """Return a hook that moves a gradient of another dtype into its part."""

        def add(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            self.parts[number] += parameter.grad
            parameter.grad = None

        return add
