"""RMSNorm and rotary position embeddings on the CPU, in fewer passes over memory.

Written as single operations, as in transformers, they take two to three times as long with their
gradients. The gradients here are written out, reuse memory, and keep no copy of the inputs.
"""

from __future__ import annotations

from typing import Any

import torch

Rotation = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Cosines [..., D], and sines [..., D / 2] of the lower and of the upper half."""


def rms_norm(inputs: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root mean square layer normalization (Zhang and Sennrich, https://arxiv.org/abs/1910.07467).

    Args:
        inputs: [..., K].
        weight: [K].
        eps: added to the mean square.

    Returns:
        [..., K]: `weight` times the inputs divided by their root mean square. This is computed in
        float32, and rounded to the type of the inputs before it is multiplied.
    """
    if torch.is_grad_enabled() and (inputs.requires_grad or weight.requires_grad):
        normed: Any = _RMSNorm.apply(inputs, weight, eps)
        return normed
    return _normed(inputs, _inverse_rms(inputs.float(), eps), weight)


def _inverse_rms(values: torch.Tensor, eps: float) -> torch.Tensor:
    """float32 [..., 1] of float32 [..., K]."""
    norm = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
    return norm.square_().div_(values.shape[-1]).add_(eps).rsqrt_()


def _normed(inputs: torch.Tensor, inverse: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    normed = inputs * inverse
    return normed.mul_(weight) if normed.dtype == inputs.dtype == weight.dtype else weight * normed.to(inputs.dtype)


class _RMSNorm(torch.autograd.Function):
    """`rms_norm` with a gradient."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        inverse = _inverse_rms(inputs.float(), eps)
        ctx.save_for_backward(inputs, weight, inverse)
        return _normed(inputs, inverse, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """With x the inputs, r their inverse root mean square, w the weight and g the gradient:
        r (g w) - x r^3 mean(g w x) is that of x, and the sum of g x r over the rows that of w.
        """
        inputs, weight, inverse = ctx.saved_tensors
        of_inputs, of_weight, _ = ctx.needs_input_grad
        gradient, values, scale = gradients[0].float(), inputs.float(), weight.float()
        product = (gradient * values).flatten(0, -2)
        found: list[torch.Tensor | None] = [None, None, None]
        if of_weight:
            found[1] = torch.mv(product.t(), inverse.flatten()).to(weight.dtype)
        if of_inputs:
            mean = torch.mv(product, scale).view_as(inverse).div_(-values.shape[-1])
            along = mean.mul_(inverse).mul_(inverse).mul_(inverse)
            found[0] = (gradient * scale).mul_(inverse).addcmul_(values, along).to(inputs.dtype)
        return tuple(found)


def rotation(cos: torch.Tensor, sin: torch.Tensor) -> Rotation:
    """Of cosines and sines [..., D]."""
    half = sin.shape[-1] // 2
    return cos, sin[..., :half], sin[..., half:]


def rotate(states: torch.Tensor, turn: Rotation) -> torch.Tensor:
    """Rotary position embedding (Su et al., https://arxiv.org/abs/2104.09864) of halves.

    Args:
        states: [..., D]; place i of the lower half and place i of the upper one are a pair.
        turn: of shapes that broadcast to that of `states`.

    Returns:
        [..., D], in memory that is laid out like `states`.
    """
    if torch.is_grad_enabled() and states.requires_grad:
        rotated: Any = _Rotate.apply(states, *turn)
        return rotated
    return _rotated(states, turn, 1)


def _rotated(states: torch.Tensor, turn: Rotation, sign: int) -> torch.Tensor:
    cos, low, high = turn
    half, out = low.shape[-1], states * cos
    out[..., :half].addcmul_(states[..., half:], low, value=-sign)
    out[..., half:].addcmul_(states[..., :half], high, value=sign)
    return out


class _Rotate(torch.autograd.Function):
    """`rotate` with a gradient: the transpose, which turns back."""

    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, cos: torch.Tensor, low: torch.Tensor, high: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(cos, low, high)
        return _rotated(states, (cos, low, high), 1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, low, high = ctx.saved_tensors
        return _rotated(gradients[0], (cos, high, low), -1), None, None, None
