"""Check that the processes of a run fit into the memory of their devices. Imports torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rl_app_ppo.checks.memory import shown_bytes
from rl_app_ppo.checks.model_size import model_size
from rl_app_ppo.checks.role_memory import ModelSize, held_size, host_parts, lasting_bytes, role_bytes
from rl_app_ppo.config.devices import PlannedProcess
from rl_app_ppo.config.model_path import described_reference
from rl_app_ppo.config.placement import Role
from rl_app_ppo.config.schema import AppConfig
from rl_protocol import ConfigError
from rl_trainer.config.backends import FsdpConfig, TorchConfig
from rl_trainer.config.lora import LoraConfig


def check_gpu_memory(path: Path, config: AppConfig, planned: Sequence[PlannedProcess], available: int) -> None:
    """Check that weights, gradients and optimizer of each process fit into its GPUs, and beside
    them the part of a replica that shares these.

    Args:
        path: folder with the model's config.json.
        config: the configuration of the run.
        planned: its processes.
        available: bytes of each GPU.

    Raises:
        ConfigError: a process needs more; names its roles, their parts, and what to change.
    """
    whole = model_size(path, config.lora)
    held = {process.name: _lasting(process, config, whole) for process in planned}
    for process in planned:
        parts = held[process.name]
        if process.lenders:
            beside = {name: _beside_replicas(held[name], config) for name in process.lenders}
            _check_shared(process, beside, config, available)
        elif process.gpus and sum(parts.values()) > process.gpus * available:
            listed = ", ".join(f"{name} {shown_bytes(count)}" for name, count in parts.items())
            remedy = (
                "rollout.tensor_model_parallel_size, or take a smaller model.path"
                if process.roles == ("rollout",) and config.rollout.name == "vllm"
                else "the ranks of model_engine=fsdp (fsdp.world_size), set lora.rank, or take a smaller model.path"
            )
            raise ConfigError(
                f"Process {process.name} needs {shown_bytes(sum(parts.values()))} of GPU memory before any activation or KV cache ({listed}); "
                f"GPUs: {process.gpus} of {shown_bytes(available)} each. Raise {remedy}. --plan prints all processes."
            )


def role_sizes(path: Path | None, config: AppConfig) -> Callable[[Role], ModelSize]:
    """The sizes of the model that a role has.

    Args:
        path: folder with the config.json of the policy's model; None: the demo model.
        config: the configuration of the run.

    Raises:
        ConfigError: a model can't be planned.
    """
    policy, teacher = model_size(path, config.lora), described_reference(config)
    reference = policy if teacher is None else model_size(teacher, LoraConfig())
    return lambda role: reference if role == "ref" else policy


def check_host_memory(
    sizes: Callable[[Role], ModelSize],
    config: AppConfig,
    planned: Sequence[PlannedProcess],
    available: int,
    *,
    image_tokens: int = 0,
) -> str | None:
    """Check that the largest forward passes of the processes on the CPU, and their caches, fit into
    this machine's memory beside the models.

    Args:
        sizes: of the model that a role has.
        config: the configuration of the run.
        planned: its processes.
        available: bytes of memory for new processes.
        image_tokens: most tokens of a prompt that stand for images.

    Returns:
        The estimate for people; None: no process computes on the CPU.

    Raises:
        ConfigError: they need more; names the largest parts, and the keys that bound them.
    """
    parts = {
        f"{process.name} {role} {part}": count
        for process in planned
        if not process.uses_gpus
        for role in process.roles
        for part, count in role_bytes(role, config, sizes(role), image_tokens=image_tokens).items()
    }
    if not parts:
        return None
    needed = f"at most {shown_bytes(sum(parts.values()))} by estimate; {shown_bytes(available)} are available"
    if sum(parts.values()) > available:
        largest = sorted(parts.items(), key=lambda part: part[1], reverse=True)[:3]
        listed = ", ".join(f"{name} {shown_bytes(count)}" for name, count in largest)
        raise ConfigError(
            f"The processes on the CPU can need more memory than there is: {needed}. The largest parts are {listed}. Lower "
            "actor.ppo_max_token_len (activations), rollout.max_batch_size (KV cache), data.max_prompt_length or rollout.response_length. "
            "`rl plan` lists all parts."
        )
    return needed


def _lasting(process: PlannedProcess, config: AppConfig, whole: ModelSize) -> dict[str, int]:
    """Role and part -> bytes of what a process holds on its GPUs between passes."""
    return {
        f"{role} {name}": count
        for role in process.roles
        for size in [held_size(role, config, whole)]
        for name, count in lasting_bytes(role, config, size.weights, size.trained, on_gpu=True).items()
        if name not in host_parts(role, config)
    }


def _beside_replicas(parts: Mapping[str, int], config: AppConfig) -> int:
    """Bytes that stay on the GPU while replicas generate."""
    offloaded = ("gradients", "optimizer") if config.engine.offloads_optimizer else ()
    return sum(count for name, count in parts.items() if not name.endswith(offloaded))


def _check_shared(process: PlannedProcess, lenders: Mapping[str, int], config: AppConfig, available: int) -> None:
    """Check that a replica fits beside what the ranks hold whose GPUs it uses."""
    part = config.rollout.gpu_memory_utilization
    name, most = max(lenders.items(), key=lambda lender: lender[1])
    can_offload = isinstance(config.engine, FsdpConfig | TorchConfig) and not config.engine.offloads_optimizer
    offload = f"set {config.model_engine}.optimizer_offload=true, " if can_offload else ""
    if most + part * available > available:
        raise ConfigError(
            f"Process {process.name} takes rollout.gpu_memory_utilization={part:g} of each GPU of {', '.join(lenders)}, and {name} holds "
            f"{shown_bytes(most)} of {shown_bytes(available)} before any activation. Lower it to at most "
            f"{max(0.0, math.floor(100 * (1 - most / available)) / 100):g}, {offload}or raise the ranks of "
            "model_engine=fsdp (fsdp.world_size). --plan prints all processes."
        )
