"""The memory that code takes under FakeTensorMode, where tensors have shapes and no values."""

from __future__ import annotations

import dataclasses
import weakref
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from standin_device import caller
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from rl_trainer.backends import token_batch, torch_critic, torch_policy

_ops: Any = torch.ops.aten


class FakeMemory(TorchDispatchMode):
    """Within it, product code builds transformers models without their weights, and computes with
    tensors without values.

    Where the host asks for a value it gets 1, and a mask selects everything.

    Attributes:
        held, peak: bytes of the tensors that exist, and the most so far; each storage counts once.
        reads: functions of the product that asked for a value, `file.py:function`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self.reads: set[str] = set()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._contexts = ExitStack()
        self._seen: weakref.WeakKeyDictionary[torch.UntypedStorage, list[int]] = weakref.WeakKeyDictionary()

    def __enter__(self) -> FakeMemory:
        self._contexts.enter_context(mock.patch.object(AutoModelForCausalLM, "from_pretrained", _from_config))
        self._contexts.enter_context(mock.patch.object(torch.nn.Module, "_apply", _apply))
        for module in (torch_policy, torch_critic):
            self._contexts.enter_context(mock.patch.object(module, "token_batch", self._token_batch))
        self._contexts.enter_context(self._fake)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._contexts.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ops._local_scalar_dense.default:
            self.reads.add(caller())
            return 1
        if func is _ops.index.Tensor and any(one is not None and one.dtype == torch.bool for one in args[1]):
            self.reads.add(caller())
            return args[0].clone()
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, torch.Tensor):
                self._count(one)
        return made

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if (known := self._seen.get(storage)) is None:
            weakref.finalize(storage, self._drop, cell := [size])
            self._seen[storage] = cell
        elif known[0] == size:
            return
        else:
            self.held -= known[0]
            known[0] = size
        self.held += size
        self.peak = max(self.peak, self.held)

    def _drop(self, cell: list[int]) -> None:
        self.held -= cell[0]

    def _token_batch(self, *args: Any, device: torch.device, **kwargs: Any) -> Any:
        """`token_batch`, which computes places on the host from the values of the batch."""
        with _disable_current_modes():
            made = token_batch.token_batch(*args, **kwargs)

        def there(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return self._fake.from_tensor(value).to(device)
            if isinstance(value, dict):
                return {name: there(one) for name, one in value.items()}
            if dataclasses.is_dataclass(value) and not isinstance(value, type):
                fields = {field.name: there(getattr(value, field.name)) for field in dataclasses.fields(value)}
                return dataclasses.replace(value, **fields)
            return value

        return there(made)


def _from_config(path: str, *, dtype: torch.dtype, local_files_only: bool, **attention: str) -> Any:
    config = AutoConfig.from_pretrained(path, local_files_only=local_files_only)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, **attention)


def _apply(model: torch.nn.Module, function: Any, recurse: bool = True) -> torch.nn.Module:
    """`Module._apply`, which can't replace the data of a parameter without values."""
    assert recurse
    made = dict[torch.Tensor, torch.nn.Parameter]()  # tied weights stay one
    with torch.no_grad():
        for module in model.modules():
            for name, weight in module.named_parameters(recurse=False):
                if weight not in made:
                    made[weight] = torch.nn.Parameter(function(weight), weight.requires_grad)
                module._parameters[name] = made[weight]
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = function(buffer)
    return model
