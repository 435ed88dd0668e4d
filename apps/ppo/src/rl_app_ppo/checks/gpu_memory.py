"""Check that the models of a run fit into the memory of its GPUs. Imports torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rl_app_ppo.checks.memory import shown_bytes
from rl_app_ppo.checks.model_size import model_size
from rl_app_ppo.checks.role_memory import lasting_bytes
from rl_app_ppo.config.devices import PlannedProcess
from rl_app_ppo.config.schema import AppConfig
from rl_protocol import ConfigError


def check_gpu_memory(path: Path, config: AppConfig, planned: Iterable[PlannedProcess], available: int) -> None:
    """Check that weights, gradients and optimizer of each process fit into its GPUs.

    Args:
        path: folder with the model's config.json.
        config: the configuration of the run.
        planned: its processes.
        available: bytes of each GPU.

    Raises:
        ConfigError: a process needs more; names its roles, their parts, and what to change.
    """
    whole = model_size(path, config.lora)
    for process in planned:
        parts = {
            f"{role} {name}": count
            for role in process.roles
            for size in [whole.body if role == "critic" else whole]
            for name, count in lasting_bytes(role, config, size.weights, size.trained, on_gpu=True).items()
        }
        if process.gpus and sum(parts.values()) > process.gpus * available:
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
