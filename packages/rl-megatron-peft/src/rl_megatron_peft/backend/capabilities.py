"""What the installed Megatron-Core can do on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

import torch

from rl_protocol.errors import ConfigError

TESTED = (0, 16)
"""Major and minor version of Megatron-Core that this backend is written for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What can be used in this process.

    Attributes:
        version: version of Megatron-Core.
        device: `cuda` if there is a GPU, else `cpu`.
        distributed_optimizer: Megatron's, which shards its state over data-parallel ranks and takes
            CUDA tensors only. `rl_megatron_peft.backend.train.optimizer` does not need it.
        megatron_clipping: Megatron's gradient clipping, which asserts CUDA tensors.
            `rl_megatron_peft.backend.train.optimizer` clips by itself.
        sequence_parallel: always available: the norms of the local spec refuse it, those of
            `rl_megatron_peft.backend.model.gpt` replace them.
    """

    version: str
    device: str
    distributed_optimizer: bool
    megatron_clipping: bool
    sequence_parallel: bool


def capabilities() -> Capabilities:
    """Return the capabilities of the installed Megatron-Core on this machine.

    Raises:
        ConfigError: the backend was not written for this version.
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
