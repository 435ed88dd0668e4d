"""GPUs of fake tensors of several ranks, of which this process is the first.

Collectives have the shapes of their results and move nothing. Torch's FSDP2 asks the CUDA driver
for streams, events and the current device, and moves parameters in a way that loses their fakes:
stand-ins of these are here.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from fake_gpu import GPU, FakeGpu
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from rl_trainer.backends import parallel_strategy, world


class _Queue:
    """A CUDA stream or event: nothing runs, so nothing is waited for."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def record_event(self, event: Any = None) -> _Queue:
        return _Queue()


_DRIVER = {
    "current_device": lambda: 0,
    "set_device": lambda device: None,
    "device_count": lambda: 8,
    "Stream": _Queue,
    "Event": _Queue,
    "current_stream": lambda device=None: _Queue(),
    "stream": lambda stream: nullcontext(),
}


class FakeRanks(FakeGpu):
    """A FakeGpu in which a world of ranks can be joined and models sharded over them."""

    def __init__(self) -> None:
        super().__init__()
        self._sharded: list[torch.nn.Module] = []
        self._stood_in: list[ExitStack] = []  # FakeTensorMode enters itself within operations

    def __enter__(self) -> FakeRanks:
        init = dist.init_process_group

        def join(backend: str, **how: Any) -> None:
            assert backend == "cpu:gloo,cuda:nccl"
            init("fake", **how)

        stack = ExitStack()
        for name, ours in _DRIVER.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, ours))
        stack.enter_context(mock.patch.object(dist, "init_process_group", join))
        stack.enter_context(mock.patch.object(world, "_open_store", return_value=FakeStore()))
        stack.enter_context(mock.patch.object(parallel_strategy, "fully_shard", self._shard))
        self._stood_in.append(stack)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stood_in.pop().close()
        if not self._stood_in and dist.is_initialized():
            dist.destroy_process_group()

    def _shard(self, module: torch.nn.Module, **how: Any) -> None:
        """`fully_shard`, of a module that has been moved before."""
        assert how["mesh"].device_type == GPU.type
        module.to(GPU)
        fully_shard(module, **how)
        self._sharded.append(module)

    def _backward(self, loss: torch.Tensor) -> None:
        """As FSDP2 ends a backward pass: weights are sharded, and so are their gradients."""
        super()._backward(loss)
        for module in self._sharded:
            assert isinstance(module, FSDPModule)
            module.reshard()
        for weight in {id(one): one for module in self._sharded for one in module.parameters()}.values():
            if weight.requires_grad and weight.grad is None:
                weight.grad = torch.zeros_like(weight)
