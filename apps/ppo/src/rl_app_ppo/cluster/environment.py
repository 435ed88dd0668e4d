"""The environment variables of a run. Imports no Ray, which reads some of them at its import."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager

_RAY_SETTINGS = {
    # Driver and workers of a machine share one uv environment. Ray's hook would package the working
    # folder and run uv again for every worker, which takes 20 s.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray runs workers at niceness 15, so that any other process of the machine goes before them.
    "RAY_worker_niceness": "0",
    # The run says itself, in one line, that a worker has died. Ray prints this although
    # log_to_driver=False, in colours also into files.
    "RAY_DEDUP_LOGS_SKIP_REGEX": "^A worker died or was killed",
}
"""Settings that the environment may override."""
_LOCAL_RAY_SETTINGS = {
    # Despite its name, this decides on Linux too whether Ray listens on all interfaces of the host
    # or on 127.0.0.1. Ray replaces a loopback address passed to ray.init by that of the host.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    # Other trainers have Ray show all GPUs to every worker, and choose by themselves.
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "0",
}
"""With ray.address=local Ray listens on loopback and requires a token from every caller."""

_SET_BY_LIBRARIES = (
    "RAY_CLIENT_MODE",
    "PYTHONBREAKPOINT",  # Ray's debugger
    "MLFLOW_DISABLE_TELEMETRY",
    "MLFLOW_ALLOW_FILE_STORE",
)
"""What Ray and the MLflow logger set in this process while a run uses them."""
_SPINS = "20000"
"""Times that a waiting thread looks before it sleeps."""
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(4 << 30)}
"""glibc keeps freed memory of tensors up to a GiB, and up to 4 GiB in all, for the next ones."""
_COPIES = {"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x100000"}
"""glibc copies a MiB and more past the caches (x86; other processors ignore it)."""


def ray_settings(*, local: bool) -> dict[str, str]:
    """Variables that must be set before Ray is imported.

    Args:
        local: Ray starts for this run (ray.address=local).
    """
    settings = {name: os.environ.get(name, value) for name, value in _RAY_SETTINGS.items()}
    return settings | _LOCAL_RAY_SETTINGS if local else settings


def compute_settings(threads: int) -> dict[str, str]:
    """Variables of the compute threads and of the memory of workers, read when a process starts.

    A thread that waits for the others spins for up to a millisecond and then sleeps, unless the
    user has set OMP_WAIT_POLICY or GOMP_SPINCOUNT. On idle cores of a virtual machine, where waking
    a core is slow, an update of the demo model takes twice as long with a quarter of these spins,
    and as long with more. With all cores in use by other processes, more spins, such as libgomp's
    default, made it up to 25 times slower.

    By default glibc returns the memory of every large tensor to the kernel, which clears it page by
    page for the next one. That took half of a forward pass of 512 responses of the demo model.

    glibc copies large memory without reading the target into the caches, from a size that it
    derives from the last-level cache. A virtual machine reports that of its host: with 480 MiB the
    size is 181 MiB, and puts and gets of the data plane, which copy less at a time, took 1.7 times
    the CPU time. A copy of 1 MiB and its source fill the second-level cache of one core, so it does
    not stay there anyway. The user's MALLOC_* and GLIBC_TUNABLES variables are kept.

    Args:
        threads: trainer.threads_per_worker.
    """
    settings = {"OMP_NUM_THREADS": str(threads or 1)}
    settings |= {name: os.environ.get(name, value) for name, value in (_ALLOCATOR | _COPIES).items()}
    if "OMP_WAIT_POLICY" not in os.environ:
        settings["GOMP_SPINCOUNT"] = os.environ.get("GOMP_SPINCOUNT", _SPINS)
    return settings


@contextmanager
def environment(values: Mapping[str, str]) -> Generator[None]:
    """Set environment variables; restore them, and those that libraries set, on exit."""
    before = {name: os.environ.get(name) for name in (*values, *_SET_BY_LIBRARIES)}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
