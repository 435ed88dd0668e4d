"""How much memory the processes of a run will need, said before they are started."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from rl_app_ppo.schema import AppConfig
from rl_protocol import ConfigError
from rl_trainer import needs_critic, needs_reference

WEIGHTS = 4
"""Bytes of a float32 weight."""
TRAINED = 16
"""With its gradient and the two moments of AdamW."""


def parameters(model: Path) -> int:
    """Number of weights in a checkpoint folder, from the headers of its safetensors files.

    Raises:
        ConfigError: a header can't be read.
    """
    total = 0
    for path in sorted(model.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header: dict[str, dict[str, Any]] = json.loads(file.read(min(size, 100_000_000)))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"model.path={str(model)!r}: {path.name} is no readable safetensors file: {error}"
            ) from error
        total += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return total


def needed_bytes(count: int, config: AppConfig) -> dict[str, int]:
    """Role -> bytes of weights, gradients and optimizer state of all its processes; activations come on top."""
    trained = WEIGHTS if config.lora.rank else TRAINED
    needed = {"actor": trained * count, "rollout": 2 * WEIGHTS * count * config.rollout.num_workers}
    if config.checkpoint_engine.enabled and not config.sends_adapters:
        needed["weight sync"] = WEIGHTS * count
    if needs_reference(config.algorithm, config.actor) and not config.lora.rank:
        needed["ref"] = WEIGHTS * count
    if needs_critic(config.algorithm):
        needed["critic"] = TRAINED * count
    return needed


def check_memory(count: int, config: AppConfig, available: int) -> None:
    """Refuse what can't fit into the memory of this machine.

    Raises:
        ConfigError: names the parts, their sum, and what is there.
    """
    needed = needed_bytes(count, config)
    if sum(needed.values()) > available:
        parts = ", ".join(f"{role} {_gib(size)}" for role, size in needed.items())
        raise ConfigError(
            f"A model of {count:,} weights needs {_gib(sum(needed.values()))} of memory before any activation ({parts}); "
            f"{_gib(available)} are available. Set lora.rank, lower rollout.num_workers, or take a smaller model.path."
        )


def available_bytes() -> int:
    """Memory that processes started now can have."""
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("every Linux since 3.14 has MemAvailable")


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
