"""vLLM plugin: what a rollout engine needs in each process that vLLM starts for it.

The package registers `prepare_process` as an entry point of the group `vllm.general_plugins`, whose
functions vLLM calls early in each of its processes: before it loads a model, and so before it
allocates the memory of a GPU.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from rl_protocol.support.host.this_process import end_with_parent
from rl_rollout_vllm.config import CLIENT_VARIABLE

_tracked: set[str] = set()
"""Files in /dev/shm that Python's resource tracker removes if this process is killed."""


def prepare_process() -> None:
    """Have this process leave nothing behind if the client is killed: neither itself nor files."""
    client, parent = os.environ.get(CLIENT_VARIABLE), multiprocessing.parent_process()
    if client is None or int(client) == os.getpid() or parent is None:
        return
    _end_with_parent(parent)
    _track_shared_memory()


def unlink_shared_memory(name: str) -> None:
    """Remove a file of /dev/shm that all its users have mapped."""
    Path("/dev/shm", name).unlink(missing_ok=True)
    if name in _tracked:
        _tracked.remove(name)
        resource_tracker.unregister(f"/{name}", "shared_memory")


def _end_with_parent(parent: Any) -> None:
    """Have the kernel kill this process when its parent ends, even by SIGKILL.

    The engine's process is a child of the client, its workers are children of the engine's process.
    Otherwise they would outlive a client that is killed, and keep their memory.
    """
    end_with_parent()
    if not parent.is_alive():  # it ended before the kernel knew
        os.kill(os.getpid(), signal.SIGKILL)


def _track_shared_memory() -> None:
    """Register the memory that workers on the CPU share for collectives with the resource tracker.

    vLLM creates it in C++, which removes it only at a regular end, and `unlink_shared_memory` is
    called only once the engine is up. The tracker is a process of Python's that outlives a killed
    one and removes what is still registered.
    """
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    if not current_platform.is_cpu():
        return
    from vllm.distributed.device_communicators import cpu_communicator  # pyright: ignore[reportMissingImports]

    collectives = cpu_communicator._CPUSHMDistributed
    vllm_name = collectives.make_group_name

    def tracked_name(communicator: Any) -> str:
        group = vllm_name(communicator).replace(":", "-")  # a tracker's lines are separated by colons
        name = f"{group}_{communicator.rank}"
        if name not in _tracked:
            _tracked.add(name)
            resource_tracker.register(f"/{name}", "shared_memory")
        return group

    collectives.make_group_name = staticmethod(tracked_name)
