"""Linear layers by oneDNN on processors whose AVX-512 MKL does not use.

torch computes float32 products on the CPU with MKL, which uses AVX-512 on processors of Intel only.
On others that have it (AMD since Zen 4), oneDNN, which torch contains too, takes half of the time.
It compiles a kernel for each shape, in about 0.5 ms. So numbers of rows should recur: small
products are computed by oneDNN only if theirs is a multiple of ROWS.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

PROCESSORS = Path("/proc/cpuinfo")
ROWS = 16
LEAST = 1 << 22
"""Multiplications of a product below which MKL's lower cost per call counts for more."""
ANY_ROWS = 1 << 29
"""Multiplications of a product whose kernel is worth compiling for a single use."""


@functools.cache
def onednn_is_faster() -> bool:
    """Whether this processor has AVX-512, and MKL does not use it."""
    available = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if not available or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    try:
        described = PROCESSORS.read_text(encoding="utf-8")
    except OSError:
        return False
    return torch.backends.mkl.is_available() and "GenuineIntel" not in described


class OneDnnLinear(torch.nn.Linear):
    """A linear layer that computes `linear`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear(input, self.weight, self.bias)


def use_faster_linear(model: torch.nn.Module) -> None:
    """Have the linear layers of a model compute `linear`, if this processor gains from it."""
    if onednn_is_faster():
        for module in model.modules():
            if type(module) is torch.nn.Linear:
                module.__class__ = OneDnnLinear


def row_multiple(device: torch.device) -> int:
    """Of which number the rows that a model computes on that device should be a multiple."""
    return ROWS if device.type == "cpu" and onednn_is_faster() else 1


def linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`torch.nn.functional.linear`, by oneDNN where that is faster.

    Args:
        inputs: [..., K].
        weight: [N, K].
        bias: [N] or None.

    Returns:
        [..., N].
    """
    if not _suits(inputs, weight):
        return torch.nn.functional.linear(inputs, weight, bias)
    rows = inputs.reshape(-1, inputs.shape[-1])
    out: Any = _Linear.apply(rows, weight, bias) if torch.is_grad_enabled() else _by_onednn(rows, weight, bias)
    return out.view(*inputs.shape[:-1], len(weight))


def product(inputs: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`inputs` [M, K] @ `weight` [N, K]^T without a gradient, by oneDNN where that is faster.

    Returns:
        `out` [M, N], or other memory.
    """
    return _by_onednn(inputs, weight) if _suits(inputs, weight) else torch.mm(inputs, weight.t(), out=out)


def _suits(inputs: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether oneDNN takes less time for a product of tensors that it can read."""
    work = inputs.numel() * len(weight)
    return (
        work >= LEAST
        and inputs.dtype == weight.dtype == torch.float32
        and inputs.device.type == weight.device.type == "cpu"
        and (work >= ANY_ROWS or not inputs.numel() // inputs.shape[-1] % ROWS)
        and type(inputs) is torch.Tensor
        and type(weight) in (torch.Tensor, torch.nn.Parameter)
        and onednn_is_faster()
    )


def _by_onednn(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")


class _Linear(torch.autograd.Function):
    """`linear` of rows [M, K], with gradients by oneDNN."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        return _by_onednn(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        of_inputs, of_weight, of_bias = ctx.needs_input_grad
        return (
            _by_onednn(gradient, weight.t()) if of_inputs else None,
            _weight_gradient(gradient, inputs) if of_weight else None,
            gradient.sum(0) if of_bias else None,
        )


def _weight_gradient(gradient: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """[N, K], `gradient` [M, N]^T @ `inputs` [M, K].

    oneDNN reads the transpose of one factor in place. That of the other is copied: of the narrower.
    """
    if gradient.shape[1] <= inputs.shape[1]:
        return _by_onednn(gradient.t(), inputs.t())
    return _by_onednn(inputs.t(), gradient.t()).t()
