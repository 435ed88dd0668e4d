"""What the installed Megatron-Core can do here, and running it where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rl_protocol.errors import ConfigError

TESTED = (0, 16)
"""Major and minor version of Megatron-Core that this backend is written for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What can be used in this process.

    Attributes:
        version: of Megatron-Core.
        device: cuda where there is one, and cpu elsewhere.
        distributed_optimizer: Megatron's, which shards its state over the data-parallel ranks; it takes CUDA tensors alone. Ours is in
            `rl_megatron_peft.backend.optimise` and asks for none.
        megatron_clipping: Megatron's gradient clipping, which asserts CUDA tensors; here `rl_megatron_peft.backend.optimise` clips.
        sequence_parallel: everywhere: the local spec's norms refuse it, those of `rl_megatron_peft.backend.model` take their place.
    """

    version: str
    device: str
    distributed_optimizer: bool
    megatron_clipping: bool
    sequence_parallel: bool


def capabilities() -> Capabilities:
    """Of the installed Megatron-Core on this machine; nothing of what is not used by this backend yet is promised.

    Raises:
        ConfigError: a version this backend was not written for.
    """
    version = metadata.version("megatron-core")
    if tuple(int(part) for part in version.split(".")[:2]) != TESTED:
        raise ConfigError(
            f"Megatron-Core {version} is installed, the backend is written for {TESTED[0]}.{TESTED[1]}; "
            f"install 'rl-megatron-peft[core]'."
        )
    gpu = torch.cuda.is_available()
    return Capabilities(
        version=version,
        device="cuda" if gpu else "cpu",
        distributed_optimizer=gpu,
        megatron_clipping=gpu,
        sequence_parallel=True,
    )


class _CudaToCpu(TorchFunctionMode):
    """Rewrites `device="cuda"` in calls that make tensors."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


def _wait_for_nothing(device: object = None) -> None:
    del device


@contextmanager
def cpu_compat() -> Generator[None]:
    """Within it Megatron-Core 0.16 computes on the CPU; afterwards torch is as it was.

    Megatron names the current CUDA device where it makes tensors (rotary embedding, collectives, pipeline, causal mask) and synchronises
    with it. The two functions and the argument are redirected, nothing of Megatron is changed. To be deleted when Megatron asks its
    configuration for the device.

    Raises:
        ConfigError: there is a GPU.
    """
    if torch.cuda.is_available():
        raise ConfigError("cpu_compat is for machines without a GPU; this one has one, so leave it out.")
    current_device, synchronize = torch.cuda.current_device, torch.cuda.synchronize
    torch.cuda.current_device = lambda: torch.device("cpu")  # pyright: ignore[reportAttributeAccessIssue]: what Megatron passes as `device`
    torch.cuda.synchronize = _wait_for_nothing
    try:
        with _CudaToCpu():
            yield
    finally:
        torch.cuda.current_device, torch.cuda.synchronize = current_device, synchronize


def runnable() -> AbstractContextManager[None]:
    """`cpu_compat` where it is needed, and nothing elsewhere."""
    return nullcontext() if torch.cuda.is_available() else cpu_compat()
