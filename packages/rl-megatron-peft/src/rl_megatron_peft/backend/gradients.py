"""Gradients of what a rank trains, in one float32 tensor, and their sum over data-parallel replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rl_megatron_peft.backend.parallel import sum_over_replicas, sum_to_replica
from rl_megatron_peft.backend.trained import Trained


class Gradients:
    """They are summed up over micro-batches as they come. What one replica keeps the optimizer's state of lies together.

    Args:
        trained: the parameters.
        keepers: which replica keeps the state of each of them; None: every replica that of all.
        device: where they are.
    """

    def __init__(self, trained: Sequence[Trained], keepers: Sequence[int] | None, device: torch.device) -> None:
        self.parts: list[torch.Tensor] = []
        self._parameters = [one.parameter for one in trained]
        self._keepers = keepers
        self._device = device
        self._flat: torch.Tensor | None = None  # there are models that are never trained
        for number, parameter in enumerate(self._parameters):
            if parameter.dtype != torch.float32:
                parameter.register_post_accumulate_grad_hook(self._adder(number))

    def zero(self) -> None:
        """Forget them; `parts` has one of the shape of each parameter from now on, which backward passes add to."""
        if self._flat is None:
            self._lay_out()
        assert self._flat is not None
        self._flat.zero_()
        for parameter, part in zip(self._parameters, self.parts, strict=True):
            if parameter.dtype == torch.float32:
                parameter.grad = part

    def sum_up(self) -> None:
        """Sum over replicas, each part on those that keep its state; on the others it is of no use afterwards. A collective over replicas."""
        assert self._flat is not None
        if self._keepers is None:
            sum_over_replicas(self._flat)
            return
        begin = 0
        for replica in sorted(set(self._keepers)):
            numbers = [number for number, keeper in enumerate(self._keepers) if keeper == replica]
            end = begin + sum(self.parts[number].numel() for number in numbers)
            sum_to_replica(self._flat[begin:end], replica)
            begin = end

    def _lay_out(self) -> None:
        sizes = [parameter.numel() for parameter in self._parameters]
        keepers = self._keepers
        order = sorted(range(len(sizes)), key=lambda number: (keepers[number] if keepers else 0, number))
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
        def add(done: torch.Tensor) -> None:
            assert done.grad is not None
            self.parts[number] += done.grad
            done.grad = None

        return add
