"""Where the weights of a trained model are: in this process, or sharded over ranks by FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from rl_protocol import ConfigError
from rl_trainer.backends.compute_weights import ComputeWeights, warn_if_slow
from rl_trainer.backends.loading import UnreadWeights, load_model, load_unread
from rl_trainer.backends.world import CPU, World, device_of
from rl_trainer.config.backends import FsdpConfig, TorchConfig


class ParallelStrategy(Protocol):
    """How a model is spread over ranks."""

    world: World
    device: torch.device

    def load(self, path: Path, *, packed: bool, whole: bool = False) -> tuple[Any, UnreadWeights | None]:
        """`load_model`, and what `prepare` reads of its weights; `whole`: they are read at once."""
        ...

    def prepare(self, model: torch.nn.Module, layers: tuple[str, ...], unread: UnreadWeights | None = None) -> None:
        """Move a model that was loaded on the CPU to the device, and prepare it.

        Args:
            model: of `load`, or a model around it.
            layers: class names of its repeated blocks.
            unread: of `load`.
        """
        ...


class PlainStrategy:
    """The whole model in this process."""

    def __init__(self, config: TorchConfig = TorchConfig(), device: torch.device = CPU) -> None:  # noqa: B008 (frozen)
        self.world = World()
        self.device = device
        self._config = config

    def load(self, path: Path, *, packed: bool, whole: bool = False) -> tuple[Any, None]:
        """Load the model; all of it is needed here."""
        del whole
        return load_model(path, packed=packed), None

    def prepare(self, model: torch.nn.Module, layers: tuple[str, ...], unread: UnreadWeights | None = None) -> None:
        """Move the model, and let bfloat16 copies of its weights compute if the settings say so."""
        del layers, unread
        model.to(self.device)
        if self._config.param_dtype == "bfloat16":
            if self.device.type == "cpu":
                warn_if_slow("TorchConfig.param_dtype")
            ComputeWeights(model, torch.bfloat16)


class FsdpStrategy:
    """FSDP2 (`fully_shard`): one parameter group per layer and one for the rest, in float32."""

    def __init__(self, config: FsdpConfig, world: World) -> None:
        self.world = world
        self.device = device_of(config.device)
        self._config = config

    def load(self, path: Path, *, packed: bool, whole: bool = False) -> tuple[Any, UnreadWeights | None]:
        """Load the model; where there are several ranks, without its weights."""
        if whole or self.world.size == 1:
            return load_model(path, packed=packed), None
        return load_unread(path, packed=packed)

    def prepare(self, model: torch.nn.Module, layers: tuple[str, ...], unread: UnreadWeights | None = None) -> None:
        """Shard the model, and read the weights of this rank.

        Raises:
            ConfigError: offload to the CPU while training on the CPU; or the weights can't be read.
        """
        config = self._config
        if config.cpu_offload and self.device.type == "cpu":
            raise ConfigError(
                "FsdpConfig.cpu_offload must be false where there is no GPU; got true, and FsdpConfig.device=auto."
            )
        blocks = [module for module in model.modules() if type(module).__name__ in layers]
        if config.activation_checkpointing:
            for block in blocks:
                block.forward = partial(_recomputed, block.forward)
        compute = torch.bfloat16 if config.param_dtype == "bfloat16" else None
        shard = partial(
            fully_shard,
            mesh=init_device_mesh(self.device.type, (self.world.size,)),
            reshard_after_forward=config.reshard_after_forward,
            mp_policy=MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32),
            offload_policy=CPUOffloadPolicy() if config.cpu_offload else OffloadPolicy(),
        )
        for block in blocks:
            shard(block)
        shard(model)
        if unread is not None:
            unread.read(self.world)


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return (
        checkpoint(forward, *args, use_reentrant=False, **kwargs)
        if torch.is_grad_enabled()
        else forward(*args, **kwargs)
    )


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The full parameter, on its device. A collective: all ranks ask for the same ones in the same
    order.
    """
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
