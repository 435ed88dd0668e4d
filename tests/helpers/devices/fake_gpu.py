"""A GPU of fake tensors: tensors of the device `cuda` that have shapes and no values.

An operation on a tensor of the fake GPU and one of the CPU raises, as on a GPU, except for scalars
and copies. What the host reads from it is 1, and a mask chooses all. A backward pass gives every
weight a gradient without computing it, because torch needs a driver to run one on `cuda`;
`standin_device` runs real ones.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from host_reads import SHAPED_BY_VALUES, HostRead, running
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map_only

GPU = torch.device("cuda:0")
CPU = torch.device("cpu")

_ANSWERS = {
    "get_device_name": "NVIDIA H100 80GB HBM3",
    "synchronize": None,
    "max_memory_allocated": 0,
    "max_memory_reserved": 0,
}
"""What functions of torch.cuda return that need a driver."""

_ops: Any = torch.ops.aten
_any_attention = torch.nn.functional.scaled_dot_product_attention


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **how: Any) -> torch.Tensor:
    """Flash attention where a GPU takes it; torch does not choose it without a driver."""
    if not query.is_cuda or query.dtype != torch.bfloat16 or how.get("attn_mask") is not None:
        return _any_attention(query, key, value, **how)
    flash = _ops._scaled_dot_product_flash_attention
    return flash(query, key, value, 0.0, how["is_causal"], scale=how.get("scale"))[0]


class FakeGpu(FakeTensorMode):
    """Within it, the device GPU can be used.

    Attributes:
        at_backward: bytes of the GPU in use at the start of each backward pass.
        host_reads: where the host has read from the GPU, outside of backward passes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.at_backward: list[int] = []
        self.host_reads: set[HostRead] = set()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._patches: list[Any] = []  # FakeTensorMode enters itself within operations

    @property
    def held(self) -> int:
        """Bytes in use."""
        self._storages = {key: found for key, found in self._storages.items() if not found[0].expired()}
        return sum(size for _, size in self._storages.values())

    def __enter__(self) -> FakeGpu:
        for place, name, ours in (
            (torch.Tensor, "backward", lambda loss: self._backward(loss)),
            (torch.nn.functional, "scaled_dot_product_attention", _attention),
            *((torch.cuda, name, lambda *_, answer=answer: answer) for name, answer in _ANSWERS.items()),
        ):
            self._patches.append(mock.patch.object(place, name, ours))
            self._patches[-1].start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for _ in range(2 + len(_ANSWERS)):
            self._patches.pop().stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        asked = kwargs.get("device")
        there = any(isinstance(one, FakeTensor) for one in tree_leaves((args, kwargs)))
        if not there and (asked is None or torch.device(asked).type != GPU.type):
            return func(*args, **kwargs)
        if func is _ops._local_scalar_dense.default:
            self.host_reads.add(running("scalar"))
            return torch.ones((), dtype=args[0].dtype).item()
        if func is _ops._to_copy.default and asked is not None and torch.device(asked) == CPU:
            self.host_reads.add(running("copy"))
            return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if func is _ops.copy_.default and not isinstance(args[0], FakeTensor):
            self.host_reads.add(running("copy"))
            return args[0].fill_(1)
        args, kwargs = tree_map_only(torch.Tensor, self._taken, (args, kwargs))
        if func is _ops.index.Tensor and [index.dtype for index in args[1] if index is not None] == [torch.bool]:
            self.host_reads.add(running("index by a mask"))
            func, args = _ops.reshape.default, (args[0], (-1,))
        if func in SHAPED_BY_VALUES:
            self.host_reads.add(running(SHAPED_BY_VALUES[func]))
        made = super().__torch_dispatch__(func, types, args, kwargs)
        for tensor in tree_leaves(made):
            if isinstance(tensor, FakeTensor) and tensor.device.type == GPU.type:
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return made

    def _taken(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake of a tensor of the CPU, or of one on `meta`: that of a model without weights."""
        if isinstance(tensor, FakeTensor):
            return tensor
        if tensor.is_meta:
            how = {"dtype": tensor.dtype, "device": CPU}
            return super().__torch_dispatch__(_ops.empty_strided.default, (), (tensor.size(), tensor.stride()), how)
        return self.from_tensor(tensor)

    def _backward(self, loss: torch.Tensor) -> None:
        """Give the weights that the loss depends on a gradient, or add one."""
        self.at_backward.append(self.held)
        found, left = set[Any](), [loss.grad_fn]
        while left:
            node = left.pop()
            if node is None or node in found:
                continue
            found.add(node)
            left += [one for one, _ in node.next_functions]
        for weight in (node.variable for node in found if hasattr(node, "variable")):
            with torch.no_grad():
                weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad.add_(0.0)
                for hook in list((weight._post_accumulate_grad_hooks or {}).values()):
                    hook(weight)
