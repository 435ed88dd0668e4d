"""Mixed precision: bfloat16 weights compute; those that are trained have float32 master weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from rl_trainer.backends.loading import lazy_zeros

_logger = logging.getLogger(__name__)
_Place = tuple[Any, str, torch.nn.Parameter]
"""A module, the name of one of its own weights, and the master weight."""


class ComputeWeights:
    """A model's forward pass with copies of its trained weights in another element type.

    Frozen weights are used as they are (see `cast_frozen`). A copy is made again only after its
    master weight has changed (an optimizer step, a restored checkpoint). Gradients of the copies
    are added to those of the master weights, in their element type, as soon as they are complete.
    Everything outside the forward pass (optimizer, state_dict) sees the master weights.

    Args:
        model: its `forward` is replaced.
        dtype: element type of the copies.
    """

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        self._forward = model.forward
        self._dtype = dtype
        self._places: list[_Place] = [
            (module, name, weight)
            for module in model.modules()
            for name, weight in module.named_parameters(recurse=False)
            if weight.requires_grad
        ]
        self._copies = dict[torch.nn.Parameter, torch.Tensor]()
        self._versions = dict[torch.nn.Parameter, int]()
        model.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass with the copies in place of the weights."""
        for _, _, weight in self._places:
            self._refresh(weight)
        with self._copies_in(self._places):
            return self._forward(*args, **kwargs)

    def forward_of(self, block: torch.nn.Module) -> Callable[..., Any]:
        """The forward pass of a part of the model with the copies, also where the backward pass
        runs it again."""
        forward, modules = block.forward, set(block.modules())
        places = [place for place in self._places if place[0] in modules]

        def run(*args: Any, **kwargs: Any) -> Any:
            with self._copies_in(places):
                return forward(*args, **kwargs)

        return run

    @contextmanager
    def _copies_in(self, places: Sequence[_Place]) -> Generator[None]:
        before = [module._parameters[name] for module, name, _ in places]
        try:
            for module, name, weight in places:
                module._parameters[name] = self._copies[weight]
            yield
        finally:
            for (module, name, _), weight in zip(places, before, strict=True):
                module._parameters[name] = weight

    def _refresh(self, weight: torch.nn.Parameter) -> None:
        if self._versions.get(weight) == weight._version:
            return
        copy = self._copies.get(weight)
        if copy is None:
            copy = self._copies[weight] = weight.detach().to(self._dtype, copy=True)
            copy.requires_grad_().register_post_accumulate_grad_hook(partial(_add_gradient, weight))
        else:
            with torch.no_grad():
                copy.copy_(weight)
        self._versions[weight] = weight._version


def cast_frozen(model: torch.nn.Module, dtype: torch.dtype, *, empty: bool = False) -> None:
    """Convert the weights that are not trained to the element type of the computation, in place.

    With `empty` they become zeros, which take no memory until they are written to.
    """
    for weight in model.parameters():
        if not weight.requires_grad and weight.is_floating_point():
            weight.data = lazy_zeros(weight.shape, dtype) if empty else weight.data.to(dtype)


def _add_gradient(weight: torch.nn.Parameter, copy: torch.Tensor) -> None:
    """Move the gradient of the copy to its master weight."""
    gradient, copy.grad = copy.grad, None
    assert gradient is not None
    if weight.grad is None:
        weight.grad = gradient.to(weight.dtype)
    else:
        weight.grad.add_(gradient)


def warn_if_slow() -> None:
    """Log a warning where the CPU has no instructions for bfloat16."""
    if not any(has for name, has in torch.cpu.get_capabilities().items() if "bf16" in name):
        _logger.warning(
            "TorchConfig.param_dtype=bfloat16 is slower than float32 on this CPU, which has no bfloat16 instructions "
            "(avx512_bf16, amx_bf16)."
        )
