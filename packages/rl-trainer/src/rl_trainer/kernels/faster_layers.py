"""Replaces layers of transformers' models by faster ones that compute the same."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from transformers.models.llama import modeling_llama

from rl_trainer.kernels.elementwise import rms_norm, rotate, rotation
from rl_trainer.kernels.linear import use_faster_linear

_ROTARY = "apply_rotary_pos_emb"
_ROTATIONS = modeling_llama.apply_rotary_pos_emb, modeling_llama.rotate_half
"""As they are before `use_faster_layers` replaces Llama's."""


def use_faster_layers(model: torch.nn.Module) -> None:
    """Have a model compute its linear layers, norms and rotary embeddings faster on the CPU, with
    results that differ by rounding.

    Norms and rotary embeddings are replaced where their code is a copy of Llama's, as most are in
    transformers. Rotary embeddings are a function of the model's module in transformers, which is
    replaced there: for all models of that family in the process.
    """
    use_faster_linear(model)
    for module in model.modules():
        kind = type(module)
        if _same_code(kind.forward, modeling_llama.LlamaRMSNorm.forward):
            module.__class__ = _faster_norm(kind)
        elif (family := sys.modules.get(kind.__module__)) and hasattr(family, _ROTARY):
            _use_faster_rotary(family)


def _same_code(one: object, other: object) -> bool:
    """Whether two functions are copies, apart from names of variables and docstrings."""

    def code(function: object) -> tuple[object, ...] | None:
        if not isinstance(function, FunctionType):
            return None
        found = function.__code__
        return found.co_code, found.co_names, [value for value in found.co_consts if value != function.__doc__]

    return code(one) is not None and code(one) == code(other)


@functools.cache
def _faster_norm(kind: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """A class of the same name that computes `rms_norm`."""

    @functools.wraps(kind.forward)
    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        if not hidden_states.is_cpu:
            return kind.forward(self, hidden_states)
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _use_faster_rotary(family: Any) -> None:
    original, halves = getattr(family, _ROTARY), getattr(family, "rotate_half", None)
    if _same_code(original, _ROTATIONS[0]) and _same_code(halves, _ROTATIONS[1]):
        setattr(family, _ROTARY, _rotary(original))


def _rotary(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def apply_rotary_pos_emb(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *more: Any, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        whole = q.shape[-1] == k.shape[-1] == cos.shape[-1]
        alike = q.is_cpu and q.dtype == k.dtype == cos.dtype
        if more or named or not (whole and alike) or cos.requires_grad:
            return original(q, k, cos, sin, *more, **named)
        turn = rotation(cos.unsqueeze(1), sin.unsqueeze(1))  # for all heads
        return rotate(q, turn), rotate(k, turn)

    return apply_rotary_pos_emb
