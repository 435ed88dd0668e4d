"""The ranks of a run as Megatron-Core sees them, and the few exchanges between them that are not Megatron's own."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from rl_megatron_peft.backend.compat import runnable
from rl_megatron_peft.layout import Layout
from rl_protocol.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Where this process stands.

    Attributes:
        layout: how the model is cut.
        tensor, pipeline, data: this rank's place in each direction.
        replicas: number of data-parallel replicas.
        device: cpu or a CUDA device.
    """

    layout: Layout
    tensor: int
    pipeline: int
    data: int
    replicas: int
    device: torch.device

    @property
    def first(self) -> bool:
        """It embeds the tokens."""
        return self.pipeline == 0

    @property
    def last(self) -> bool:
        """It puts out the logits."""
        return self.pipeline == self.layout.pipeline - 1


def open_ranks(layout: Layout) -> Ranks:
    """Divide the ranks of the default process group; a collective over all of them. End with `close_ranks`.

    Raises:
        ConfigError: no process group, or one that does not divide.
    """
    if not dist.is_initialized():
        raise ConfigError(
            "Call torch.distributed.init_process_group first (gloo on the CPU, nccl on GPUs); there is no process group."
        )
    size = layout.tensor * layout.pipeline
    if dist.get_world_size() % size:
        raise ConfigError(
            f"{dist.get_world_size()} ranks can't be divided into tensor={layout.tensor} * pipeline={layout.pipeline}; start a multiple of {size}."
        )
    with runnable():
        parallel_state.initialize_model_parallel(layout.tensor, layout.pipeline)
        model_parallel_cuda_manual_seed(
            0, inference_rng_tracker=True
        )  # a tracker that tracks nothing: Megatron itself draws nothing in passes
    return Ranks(
        layout=layout,
        tensor=parallel_state.get_tensor_model_parallel_rank(),
        pipeline=parallel_state.get_pipeline_model_parallel_rank(),
        data=parallel_state.get_data_parallel_rank(),
        replicas=parallel_state.get_data_parallel_world_size(),
        device=torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu"),
    )


def close_ranks() -> None:
    """Forget the division; the process group stays."""
    parallel_state.destroy_model_parallel()


def _group(group: object) -> dist.ProcessGroup:
    assert isinstance(group, dist.ProcessGroup)  # Megatron declares more than it returns
    return group


def whole_of_layer(shard: torch.Tensor, split: int | None) -> torch.Tensor:
    """A tensor put together from its shards, cut in dimension `split`; a collective over the tensor-parallel ranks."""
    group = _group(parallel_state.get_tensor_model_parallel_group())
    if split is None or group.size() == 1:
        return shard.detach()
    shards = [torch.empty_like(shard) for _ in range(group.size())]
    dist.all_gather(shards, shard.detach().contiguous(), group=group)
    return torch.cat(shards, dim=split)


def from_stage(tensor: torch.Tensor, stage: int) -> torch.Tensor:
    """The tensor that `stage` has, on all stages; the others pass one of its shape and type, which is overwritten."""
    group = _group(parallel_state.get_pipeline_model_parallel_group())
    if group.size() > 1:
        dist.broadcast(tensor, src=dist.get_global_rank(group, stage), group=group)
    return tensor


def sum_over_layer(tensor: torch.Tensor) -> torch.Tensor:
    """Sum over the tensor-parallel ranks, in place."""
    group = _group(parallel_state.get_tensor_model_parallel_group())
    if group.size() > 1:
        dist.all_reduce(tensor, group=group)
    return tensor


def sum_over_replicas(tensor: torch.Tensor) -> torch.Tensor:
    """Sum over the data-parallel ranks, in place."""
    group = _group(parallel_state.get_data_parallel_group())
    if group.size() > 1:
        dist.all_reduce(tensor, group=group)
    return tensor


def sum_to_replica(tensor: torch.Tensor, replica: int) -> None:
    """Sum over the data-parallel ranks, in place, on that one of them alone; what the others have is undefined afterwards."""
    group = _group(parallel_state.get_data_parallel_group())
    if group.size() > 1:
        dist.reduce(tensor, dst=dist.get_global_rank(group, replica), group=group)


def from_replicas(tensors: Iterable[tuple[torch.Tensor, int]]) -> None:
    """Overwrite each tensor with that of the data-parallel rank named beside it; all pass the same ones in the same order."""
    group = _group(parallel_state.get_data_parallel_group())
    if group.size() == 1:
        return
    under_way = [
        dist.broadcast(tensor, src=dist.get_global_rank(group, replica), group=group, async_op=True)
        for tensor, replica in tensors
    ]
    for work in under_way:
        assert work is not None  # this rank is part of the group
        work.wait()


def sum_over_model(tensor: torch.Tensor) -> torch.Tensor:
    """Sum over the ranks that share one replica of the model, in place."""
    group = _group(parallel_state.get_model_parallel_group())
    if group.size() > 1:
        dist.all_reduce(tensor, group=group)
    return tensor


def gather_json(value: object, device: torch.device) -> list[Any]:
    """What every rank passed, as JSON, in the order of ranks."""
    raw = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([raw.numel()], device=device))
    lengths = [int(size) for size in sizes]
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: raw.numel()] = raw
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded)
    return [json.loads(bytes(part[:n].cpu().numpy())) for part, n in zip(parts, lengths, strict=True)]
