"""A stand-in for a GPU: tensors of the device `meta` that have values.

An operation on a tensor of the stand-in and one of the CPU raises, as on a GPU, except for scalars
and copies. It computes in host memory, so the results are those of the CPU, up to rounding. (Torch
can't run a backward pass on a fake `cuda` without a driver.)
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from host_reads import SHAPED_BY_VALUES, HostRead, running
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

STAND_IN = torch.device("meta")
CPU = torch.device("cpu")

_ops: Any = torch.ops.aten
_COPIES = (_ops._to_copy.default, _ops.copy_.default)


class StrayTensorError(RuntimeError):
    """An operation got tensors of both devices."""


class _OnDevice(torch.Tensor):
    """A tensor of the stand-in; `held` has its values."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> _OnDevice:
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        made = torch.Tensor._make_wrapper_subclass(cls, held.size(), device=STAND_IN, **layout)
        made.held = held
        return made

    def __repr__(self, **_: Any) -> str:
        return f"_OnDevice({self.held!r})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})[0]


class StandIn(TorchDispatchMode):
    """Within it, the device STAND_IN can be used.

    Attributes:
        host_reads: where the host has read a value.
    """

    def __init__(self) -> None:
        super().__init__()
        self.host_reads: set[HostRead] = set()
        self._patches = ExitStack()

    def __enter__(self) -> StandIn:
        optimizers: Any = importlib.import_module("torch.optim.optimizer")
        name = "_get_fused_kernels_supported_devices"
        fused = [*getattr(optimizers, name)(), STAND_IN.type]
        self._patches.enter_context(mock.patch.object(optimizers, name, return_value=fused))
        self._patches.enter_context(mock.patch.object(torch, "tensor", _tensor))
        # views in inference mode do not pass through __torch_dispatch__
        self._patches.enter_context(mock.patch.object(torch, "inference_mode", torch.no_grad))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made, read = _compute(func, args, kwargs or {})
        if read:
            self.host_reads.add(running(read))
        return made


_plain_tensor = torch.tensor


def _tensor(data: Any, *, device: Any = None, **more: Any) -> torch.Tensor:
    """`torch.tensor`, which loses the data of a tensor on `meta` before __torch_dispatch__."""
    made = _plain_tensor(data, **more)
    return made if device is None else made.to(device)


def _compute(func: Any, args: Any, kwargs: Any) -> tuple[Any, str]:
    """The result of an operation, and `HostRead.what`; empty: the host does not wait for it."""
    flat, _ = tree_flatten((args, kwargs))
    ours = [one for one in flat if isinstance(one, _OnDevice)]
    strays = [tuple(t.shape) for t in flat if isinstance(t, torch.Tensor) and not isinstance(t, _OnDevice) and t.dim()]
    if ours and strays and func not in _COPIES:
        raise StrayTensorError(f"{func} got tensors of the stand-in and tensors of the CPU of the shapes {strays}")
    asked = kwargs.get("device")
    here = bool(ours) if asked is None else asked == STAND_IN
    held, spec = tree_flatten((args, {**kwargs, "device": CPU} if asked == STAND_IN else kwargs))
    args, kwargs = tree_unflatten([one.held if isinstance(one, _OnDevice) else one for one in held], spec)
    made = func(*args, **kwargs)
    changed = {id(one.held): one for one in ours} if func._schema.is_mutable else {}

    def wrapped(one: Any) -> Any:
        if not isinstance(one, torch.Tensor):
            return one
        return changed[id(one)] if id(one) in changed else _OnDevice(one) if here else one

    return tree_map(wrapped, made), _what(func, flat, ours, here) if ours else ""


def _what(func: Any, flat: Sequence[Any], ours: Sequence[_OnDevice], here: bool) -> str:
    """`HostRead.what` of an operation on tensors of the stand-in."""
    if func is _ops._local_scalar_dense.default:
        return "scalar"
    to_host = not isinstance(flat[0], _OnDevice) if func is _ops.copy_.default else not here
    if func in _COPIES and to_host:
        return "copy"
    if func is _ops.index.Tensor and any(one.dtype == torch.bool for one in ours):
        return "index by a mask"
    return SHAPED_BY_VALUES.get(func, "")
