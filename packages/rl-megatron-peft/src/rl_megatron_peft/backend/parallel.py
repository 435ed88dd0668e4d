"""The ranks of a run as Megatron-Core sees them, and collectives over parts of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from rl_megatron_peft.backend.cpu_shims import runnable
from rl_megatron_peft.base_model.layout import Layout
from rl_megatron_peft.errors import AdapterError
from rl_protocol.bridge.torch_replicas import TorchReplicas
from rl_protocol.errors import ConfigError, OutputError, message_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The place of this process among the ranks.

    Attributes:
        layout: how the model is divided.
        tensor: tensor-parallel rank.
        pipeline: pipeline stage.
        data: data-parallel rank.
        replicas: number of data-parallel replicas.
        expert: expert-parallel rank, in which consecutive data-parallel replicas differ.
        device: the CPU or a CUDA device.
    """

    layout: Layout
    tensor: int
    pipeline: int
    data: int
    replicas: int
    device: torch.device
    expert: int = 0

    @property
    def first(self) -> bool:
        """Whether this stage embeds the tokens."""
        return self.pipeline == 0

    @property
    def last(self) -> bool:
        """Whether this stage computes the logits."""
        return self.pipeline == self.layout.pipeline - 1


def open_ranks(layout: Layout) -> Ranks:
    """Divide the ranks of the default process group; a collective. Undo it with `close_ranks`.

    Raises:
        ConfigError: there is no process group, or its size is not divisible; or the layout divides
            layers and experts on the CPU.
    """
    if not dist.is_initialized():
        raise ConfigError(
            "Call torch.distributed.init_process_group first (gloo on the CPU, nccl on GPUs); there is no process group."
        )
    size = layout.tensor * layout.pipeline * layout.expert
    if dist.get_world_size() % size:
        raise ConfigError(
            f"{dist.get_world_size()} ranks can't be divided into tensor={layout.tensor} * pipeline={layout.pipeline} * "
            f"expert={layout.expert}; start a multiple of {size}."
        )
    if layout.tensor > 1 and layout.expert > 1 and not torch.cuda.is_available():
        raise ConfigError(
            f"expert={layout.expert} with tensor={layout.tensor} needs GPUs: gloo can't gather numbers of tokens that differ. "
            "Set one of them to 1.",
            field="expert",
        )
    with runnable():
        parallel_state.initialize_model_parallel(
            layout.tensor, layout.pipeline, expert_model_parallel_size=layout.expert
        )
        # the inference tracker tracks nothing: Megatron itself draws no random numbers in passes
        model_parallel_cuda_manual_seed(0, inference_rng_tracker=True)
    return Ranks(
        layout=layout,
        tensor=parallel_state.get_tensor_model_parallel_rank(),
        pipeline=parallel_state.get_pipeline_model_parallel_rank(),
        data=parallel_state.get_data_parallel_rank(),
        replicas=parallel_state.get_data_parallel_world_size(),
        expert=parallel_state.get_expert_model_parallel_rank(),
        device=torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu"),
    )


def close_ranks() -> None:
    """Destroy the groups that `open_ranks` made; the default process group stays."""
    parallel_state.destroy_model_parallel()


def _group(group: object) -> dist.ProcessGroup:
    assert isinstance(group, dist.ProcessGroup)  # Megatron's annotations are wider
    return group


def _all_reduced(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum over the ranks of a group, in place."""
    if group.size() > 1:
        dist.all_reduce(tensor, group=group)
    return tensor


def _overwritten(tensor: torch.Tensor, rank: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Overwrite the tensor on all ranks of a group with that of one of them."""
    if group.size() > 1:
        dist.broadcast(tensor, src=dist.get_global_rank(group, rank), group=group)
    return tensor


# -- tensor parallelism


def all_gather_tensor_parallel(shard: torch.Tensor, split: int | None) -> torch.Tensor:
    """Concatenate the shards of all tensor-parallel ranks in dimension `split`; None: no-op."""
    group = _group(parallel_state.get_tensor_model_parallel_group())
    if split is None or group.size() == 1:
        return shard.detach()
    shards = [torch.empty_like(shard) for _ in range(group.size())]
    dist.all_gather(shards, shard.detach().contiguous(), group=group)
    return torch.cat(shards, dim=split)


def all_reduce_tensor_parallel(tensor: torch.Tensor) -> torch.Tensor:
    """Sum over the tensor-parallel ranks, in place."""
    return _all_reduced(tensor, _group(parallel_state.get_tensor_model_parallel_group()))


# -- pipeline parallelism


def broadcast_from_stage(tensor: torch.Tensor, stage: int) -> torch.Tensor:
    """Overwrite the tensor on all stages with that of `stage`, of the same shape and type."""
    return _overwritten(tensor, stage, _group(parallel_state.get_pipeline_model_parallel_group()))


# -- data parallelism


def all_reduce_data_parallel(tensor: torch.Tensor) -> torch.Tensor:
    """Sum over the data-parallel replicas, in place."""
    return _all_reduced(tensor, _group(parallel_state.get_data_parallel_group()))


def reduce_to_replica(tensor: torch.Tensor, replica: int) -> None:
    """Sum over the data-parallel replicas into that of one of them; undefined on the others."""
    group = _group(parallel_state.get_data_parallel_group())
    if group.size() > 1:
        dist.reduce(tensor, dst=dist.get_global_rank(group, replica), group=group)


def broadcast_from_replicas(tensors: Iterable[tuple[torch.Tensor, int]]) -> None:
    """Overwrite each tensor with that of the replica given with it.

    All replicas must pass the same tensors in the same order.
    """
    group = _group(parallel_state.get_data_parallel_group())
    if group.size() == 1:
        return
    pending = [
        dist.broadcast(tensor, src=dist.get_global_rank(group, replica), group=group, async_op=True)
        for tensor, replica in tensors
    ]
    for work in pending:
        assert work is not None  # this rank is a member of the group
        work.wait()


# -- expert parallelism


def broadcast_from_expert_rank(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """Overwrite the tensor on all expert-parallel ranks with that of `rank`, of the same shape and
    type.
    """
    return _overwritten(tensor, rank, _group(parallel_state.get_expert_model_parallel_group()))


def all_reduce_expert_replicas(tensor: torch.Tensor) -> torch.Tensor:
    """Sum over the replicas of this rank's experts, in place."""
    return _all_reduced(tensor, _group(parallel_state.get_expert_data_parallel_group()))


def all_reduce_expert_parallel(tensor: torch.Tensor) -> torch.Tensor:
    """Sum over the ranks that hold other experts, in place."""
    return _all_reduced(tensor, _group(parallel_state.get_expert_model_parallel_group()))


def expert_replica() -> int:
    """Number of this rank's copy of its experts, from 0."""
    return parallel_state.get_expert_data_parallel_rank()


def longest_of_expert_ranks(number: int, device: torch.device) -> int:
    """Return the largest number that an expert-parallel rank passed."""
    group = _group(parallel_state.get_expert_model_parallel_group())
    if group.size() == 1:
        return number
    found = torch.tensor([number], device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return int(found)


# -- several directions


def all_reduce_model_parallel(tensor: torch.Tensor) -> torch.Tensor:
    """Sum over the ranks that share a replica of the model, in place."""
    group = _group(parallel_state.get_model_parallel_group())
    if group.size() > 1:
        dist.all_reduce(tensor, group=group)
    return tensor


def ranks_of_replica() -> TorchReplicas | None:
    """The ranks that share this replica of the model, for `tqbridge`; None: this rank is alone."""
    group = _group(parallel_state.get_model_parallel_group())
    return TorchReplicas(group) if group.size() > 1 else None


def all_gather_json(value: object, device: torch.device) -> list[Any]:
    """Return the values that all ranks passed, as JSON, in rank order."""
    raw = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([raw.numel()], device=device))
    lengths = [int(size) for size in sizes]
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: raw.numel()] = raw
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded)
    return [json.loads(bytes(part[:n].cpu().numpy())) for part, n in zip(parts, lengths, strict=True)]


def on_first_rank(work: Callable[[], str | None], path: Path, device: torch.device) -> str:
    """Call `work` on the first rank while the others wait.

    Args:
        work: reads or writes `path`.
        path: for errors.
        device: of the ranks.

    Returns:
        On all ranks the text that it returns, or "".

    Raises:
        AdapterError: on all ranks if it raises one.
        OutputError: on the other ranks, with its message, if it raises another error; the first
            one raises that error.
    """
    failure: Exception | None = None
    found: dict[str, str] = {}
    if dist.get_rank() == 0:
        try:
            found = {"returned": work() or ""}
        except Exception as error:  # noqa: BLE001 - raised below, once the other ranks know
            failure = error
            found = {"message": message_of(error) or type(error).__name__}
            if isinstance(error, AdapterError):
                found |= {"file": error.file, "field": error.field}
    found = all_gather_json(found, device)[0]
    if failure is not None:
        raise failure
    if "field" in found:
        raise AdapterError(found["message"], file=found["file"], field=found["field"])
    if "message" in found:
        raise OutputError(found["message"], path=str(path))
    return found["returned"]
