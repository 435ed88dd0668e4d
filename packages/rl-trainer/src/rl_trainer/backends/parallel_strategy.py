"""Where the weights of a trained model are: in this process, or sharded over ranks by FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from rl_protocol import ConfigError
from rl_protocol.support.host.this_process import give_back_memory
from rl_trainer.backends.compute_weights import ComputeWeights, cast_frozen, warn_if_slow
from rl_trainer.backends.loading import UnreadWeights, load_model, load_unread
from rl_trainer.backends.world import CPU, World, device_of
from rl_trainer.config.backends import FsdpConfig, TorchConfig

K = TypeVar("K")
_GROUP_BYTES = 16 << 20
"""Of full tensors that are gathered together, and then copied out of one buffer."""


class ParallelStrategy(Protocol):
    """How a model is spread over ranks."""

    world: World
    device: torch.device
    optimizer_offload: bool
    """Whether the state of an optimizer is in host memory between updates."""

    def load(
        self, path: Path, *, packed: bool, whole: bool = False, frozen: bool = False
    ) -> tuple[Any, UnreadWeights | None]:
        """`load_model`, and what `prepare` reads of its weights.

        Args:
            path, packed: see `load_model`.
            whole: the weights are read at once.
            frozen: no weight is trained, so float32 values of those that compute in bfloat16 are
                not needed.
        """
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
        self.optimizer_offload = config.optimizer_offload
        self._config = config

    def load(self, path: Path, *, packed: bool, whole: bool = False, frozen: bool = False) -> tuple[Any, None]:
        """Load the model; all of it is needed here."""
        del whole
        return load_model(path, packed=packed, dtype=_loaded_in(self._config, frozen=frozen)), None

    def prepare(self, model: torch.nn.Module, layers: tuple[str, ...], unread: UnreadWeights | None = None) -> None:
        """Move the model, and let bfloat16 weights compute, and layers be computed again in the
        backward pass, if the settings say so."""
        del unread
        half = self._config.param_dtype == "bfloat16"
        if half:  # before it is moved: a GPU never has the float32 values of frozen weights
            cast_frozen(model, torch.bfloat16)
        model.to(self.device)
        blocks = _blocks(model, layers) if self._config.activation_checkpointing else []
        if half:
            if self.device.type == "cpu":
                warn_if_slow()
            weights = ComputeWeights(model, torch.bfloat16)
            for block in blocks:
                block.forward = weights.forward_of(block)
        for block in blocks:
            block.forward = partial(_recomputed, block.forward)


class FsdpStrategy:
    """FSDP2 (`fully_shard`): one parameter group per layer and one for the rest.

    Weights that are trained are float32, frozen ones of the element type of the computation.
    """

    def __init__(self, config: FsdpConfig, world: World) -> None:
        self.world = world
        self.device = device_of(config.device)
        self.optimizer_offload = config.optimizer_offload
        self._config = config

    def load(
        self, path: Path, *, packed: bool, whole: bool = False, frozen: bool = False
    ) -> tuple[Any, UnreadWeights | None]:
        """Load the model; where there are several ranks, without its weights."""
        if whole or self.world.size == 1:
            return load_model(path, packed=packed, dtype=_loaded_in(self._config, frozen=frozen)), None
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
        blocks = _blocks(model, layers)
        if config.activation_checkpointing:
            for block in blocks:
                block.forward = partial(_recomputed, block.forward)
        compute = torch.bfloat16 if config.param_dtype == "bfloat16" else None
        if compute is not None:
            cast_frozen(model, compute, empty=unread is not None)
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
        if self.device.type == "cpu":
            give_back_memory()  # of the weights that were sharded
            for block in blocks:
                _give_back_after_first_pass(block)


def _give_back_after_first_pass(block: torch.nn.Module) -> None:
    """Return the memory that the weights of an FSDP2 block were gathered in to the kernel, once.

    The first pass leaves small lasting objects in the memory that a block was gathered in. glibc
    keeps the rest, which is too small for the weights of the next block: of a model of 0.5B in
    bfloat16 on one rank, 1.2 GiB in all.
    """

    def give_back(*_: object) -> None:
        hook.remove()
        give_back_memory()

    hook = block.register_forward_hook(give_back)  # after FSDP2's own, which frees the weights


def _loaded_in(config: TorchConfig | FsdpConfig, *, frozen: bool) -> torch.dtype:
    return torch.bfloat16 if frozen and config.param_dtype == "bfloat16" else torch.float32


def _blocks(model: torch.nn.Module, layers: tuple[str, ...]) -> list[torch.nn.Module]:
    return [module for module in model.modules() if type(module).__name__ in layers]


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return (
        checkpoint(forward, *args, use_reentrant=False, **kwargs)
        if torch.is_grad_enabled()
        else forward(*args, **kwargs)
    )


def reshard(model: torch.nn.Module) -> None:
    """Free the gathered weights of FSDP2, which a pass without gradients keeps with
    `reshard_after_forward=false`; the next pass gathers them again. The parameters of the model are
    then this rank's shards.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The full parameter, on its device. A collective: all ranks ask for the same ones in the same
    order.
    """
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def full_tensors(items: Iterable[tuple[K, Sequence[torch.Tensor]]]) -> Iterator[tuple[K, list[torch.Tensor]]]:
    """Gather the full parameters of many items, with one collective for up to 16 MiB of small ones.

    A collective takes a round trip between the ranks, however small its tensors are. All ranks
    iterate over the same items to the end.

    Args:
        items: key and tensors of each, sharded or not.

    Yields:
        Each item with its full tensors, on their devices, in the order of `items`.
    """
    group, nbytes = list[tuple[K, Sequence[torch.Tensor]]](), 0
    for item in items:
        size = sum(tensor.nbytes for tensor in item[1] if isinstance(tensor, DTensor))
        if group and nbytes + size > _GROUP_BYTES:
            yield from _gathered(group)
            group, nbytes = [], 0
        group.append(item)
        nbytes += size
    yield from _gathered(group)


def _gathered(items: Sequence[tuple[K, Sequence[torch.Tensor]]]) -> Iterator[tuple[K, list[torch.Tensor]]]:
    """The items with full tensors; those that FSDP2 has sharded are gathered together."""
    sharded = [tensor for _, tensors in items for tensor in tensors if _has_row_shards(tensor)]
    full = iter(_gather_rows(sharded) if len(sharded) > 1 else map(full_tensor, sharded))
    for key, tensors in items:
        yield key, [next(full) if _has_row_shards(tensor) else full_tensor(tensor) for tensor in tensors]


def _has_row_shards(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    return isinstance(tensor, DTensor) and tensor.placements == (Shard(0),)


def _gather_rows(tensors: Sequence[DTensor]) -> list[torch.Tensor]:
    """Gather tensors whose rows are sharded over one mesh: the bytes of all shards as one row."""
    ranks = tensors[0].device_mesh.size()
    # bytes of the longest shard of each; all ranks but the last ones have one of this size
    sizes = [-(-len(tensor) // ranks) * (tensor.nbytes // max(1, len(tensor))) for tensor in tensors]
    *starts, total = accumulate(sizes, initial=0)
    mine = torch.zeros(total, dtype=torch.uint8, device=tensors[0].to_local().device)
    for tensor, start in zip(tensors, starts, strict=True):
        shard = tensor.to_local().detach().flatten().view(torch.uint8)
        mine[start : start + len(shard)] = shard
    gathered = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(gathered, mine, group=tensors[0].device_mesh.get_group())
    return [
        torch.cat([row[start : start + size] for row in gathered])[: tensor.nbytes]
        .view(tensor.dtype)
        .view(tensor.shape)
        for tensor, start, size in zip(tensors, starts, sizes, strict=True)
    ]
