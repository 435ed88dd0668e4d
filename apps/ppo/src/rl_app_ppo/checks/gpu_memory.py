"""Check that the models of a run fit into the memory of its GPUs. Imports torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from rl_app_ppo.checks.memory import shown_bytes
from rl_app_ppo.checks.model_size import model_size
from rl_app_ppo.checks.role_memory import ModelSize, held_size, lasting_bytes
from rl_app_ppo.config.devices import PlannedProcess
from rl_app_ppo.config.schema import AppConfig
from rl_protocol import ConfigError
from rl_trainer.config.backends import FsdpConfig, TorchConfig


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
                f"its {process.gpus} GPUs have {shown_bytes(available)} each. Raise {remedy}. --plan prints all processes."
            )


def _lasting(process: PlannedProcess, config: AppConfig, whole: ModelSize) -> dict[str, int]:
    """Role and part -> bytes of what a process holds on its GPUs between passes."""
    return {
        f"{role} {name}": count
        for role in process.roles
        for size in [held_size(role, config, whole)]
        for name, count in lasting_bytes(role, config, size.weights, size.trained, on_gpu=True).items()
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
