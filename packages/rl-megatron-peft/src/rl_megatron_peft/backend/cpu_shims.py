"""Running Megatron-Core on machines without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rl_protocol.errors import ConfigError


class _CudaToCpu(TorchFunctionMode):
    """Replaces `device="cuda"` by `device="cpu"` in calls that create tensors."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


def _do_not_synchronize(device: object = None) -> None:
    del device


@contextmanager
def cpu_compat() -> Generator[None]:
    """Let Megatron-Core 0.16 compute on the CPU inside the block; torch is restored afterwards.

    Megatron names the current CUDA device where it creates tensors (rotary embedding, collectives,
    pipeline, causal mask) and synchronizes with it. Two functions and the `device` argument are
    redirected; Megatron is not changed. Delete this once Megatron takes the device from its
    configuration.

    Raises:
        ConfigError: there is a GPU.
    """
    if torch.cuda.is_available():
        raise ConfigError("cpu_compat is for machines without a GPU; this one has one, so leave it out.")
    current_device, synchronize = torch.cuda.current_device, torch.cuda.synchronize
    torch.cuda.current_device = lambda: torch.device("cpu")  # pyright: ignore[reportAttributeAccessIssue]: Megatron passes it as `device`
    torch.cuda.synchronize = _do_not_synchronize
    try:
        with _CudaToCpu():
            yield
    finally:
        torch.cuda.current_device, torch.cuda.synchronize = current_device, synchronize


def runnable() -> AbstractContextManager[None]:
    """Return `cpu_compat()` on machines without a GPU, else a context that does nothing."""
    return nullcontext() if torch.cuda.is_available() else cpu_compat()
