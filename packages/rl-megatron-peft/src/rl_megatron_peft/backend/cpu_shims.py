"""Running Megatron-Core on machines without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
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


class _CpuStream(torch.cpu.Stream):
    """A stream on the CPU, where work is done at once."""

    def record_event(self) -> torch.cpu.Event:  # pyright: ignore[reportIncompatibleMethodOverride]: torch's returns None
        """Return an event that has happened."""
        return torch.cpu.Event()


def _do_not_synchronize(device: object = None) -> None:
    del device


@contextmanager
def cpu_compat() -> Generator[None]:
    """Let Megatron-Core 0.16 compute on the CPU inside the block; torch is restored afterwards.

    Megatron names the current CUDA device where it creates tensors (rotary embedding, collectives,
    pipeline, causal mask), synchronizes with it, and copies the counts of experts' tokens on a
    stream. These functions and the `device` argument are redirected; Megatron is not changed.
    Delete this once Megatron takes the device from its configuration.

    Raises:
        ConfigError: there is a GPU.
    """
    if torch.cuda.is_available():
        raise ConfigError("cpu_compat is for machines without a GPU; this one has one, so leave it out.")
    replaced: dict[str, object] = {
        "current_device": lambda: torch.device("cpu"),  # Megatron passes it as `device`
        "synchronize": _do_not_synchronize,
        "Stream": _CpuStream,
        "stream": torch.cpu.stream,
        "current_stream": torch.cpu.current_stream,
    }
    before = {name: getattr(torch.cuda, name) for name in replaced}
    _set(replaced)
    try:
        with _CudaToCpu():
            yield
    finally:
        _set(before)


def _set(functions: Mapping[str, object]) -> None:
    for name, function in functions.items():
        setattr(torch.cuda, name, function)


def runnable() -> AbstractContextManager[None]:
    """Return `cpu_compat()` on machines without a GPU, else a context that does nothing."""
    return nullcontext() if torch.cuda.is_available() else cpu_compat()
