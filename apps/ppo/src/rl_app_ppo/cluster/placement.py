"""Check that the Ray cluster has room for the workers; actors without room would wait forever.

CPUs may be those of several nodes; GPUs are those of this node, since the ranks of a model and the
data plane share its memory.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import ray
from ray._private.state import available_resources_per_node

from rl_protocol import WorkerError
from rl_protocol.counted import counted

T = TypeVar("T")
WAIT_S = 30.0
"""Seconds to wait for what other jobs hold."""
_LOOK_S = 0.5
LOOK_TIMEOUT_S = 5.0
"""Seconds that Ray has to say what is free."""


class Cpus(NamedTuple):
    """CPUs of a cluster."""

    per_node: Sequence[float]
    free: float


def cluster_cpus() -> Cpus:
    """The CPUs of the cluster that this process is connected to."""
    nodes = [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]
    return Cpus(nodes, float(ray.available_resources().get("CPU", 0.0)))


def free_cpus() -> str:
    """The free CPUs of the cluster, in words, or that Ray does not answer in time."""
    answers = queue.SimpleQueue[Cpus]()
    threading.Thread(target=lambda: answers.put(cluster_cpus()), name="free CPUs", daemon=True).start()
    try:
        cpus = answers.get(timeout=LOOK_TIMEOUT_S)
    except queue.Empty:
        return f"Ray does not say within {LOOK_TIMEOUT_S:g} s which are free"
    return f"{cpus.free:g} of {sum(cpus.per_node):g} are free"


async def require_cpus(
    workers: int, each: float, look: Callable[[], Cpus] = cluster_cpus, wait_s: float = WAIT_S
) -> None:
    """Wait until `workers` processes of `each` CPUs can be placed.

    Raises:
        WorkerError: the nodes are too small, or other jobs held the CPUs for `wait_s` seconds.
        Names the required and the available CPUs.
    """
    if each <= 0:
        return
    needed = f"The processes need {workers * each:g} CPUs, {each:g} for each of {counted(workers, 'worker')} (ray.cpus_per_worker)"

    def enough(cpus: Cpus) -> bool:
        if sum(int(node // each) for node in cpus.per_node) < workers:
            raise WorkerError(
                f"{needed}; the Ray cluster has nodes of {', '.join(f'{node:g}' for node in cpus.per_node) or 'no'} CPUs, "
                f"{sum(cpus.per_node):g} in all. Lower ray.cpus_per_worker or rollout.num_workers, or add nodes."
            )
        return cpus.free >= workers * each

    cpus, fits = await _wait_for(look, enough, wait_s)
    if not fits:
        raise WorkerError(
            f"{needed}; of {sum(cpus.per_node):g} CPUs of the Ray cluster {cpus.free:g} are free, and no more became free within "
            f"{wait_s:g} s. Stop other jobs, lower ray.cpus_per_worker, or set it to 0 to share CPUs."
        )


def head_host() -> str:
    """Address of the head node of the cluster."""
    return ray.get_runtime_context().gcs_address.rpartition(":")[0]


def node_gpus() -> int:
    """GPUs of the node of this process, as Ray counts them."""
    here = ray.get_runtime_context().get_node_id()
    return int(sum(node["Resources"].get("GPU", 0) for node in ray.nodes() if node["NodeID"] == here))


def free_gpus() -> float:
    """GPUs of the node of this process that no job has reserved."""
    return available_resources_per_node().get(ray.get_runtime_context().get_node_id(), {}).get("GPU", 0.0)


async def require_free_gpus(wanted: int, look: Callable[[], float] = free_gpus, wait_s: float = WAIT_S) -> None:
    """Wait until so many GPUs of this node are free.

    Raises:
        WorkerError: other jobs held them for `wait_s` seconds.
    """
    free, fits = await _wait_for(look, lambda free: free >= wanted, wait_s) if wanted else (0.0, True)
    if not fits:
        raise WorkerError(
            f"The processes need {counted(wanted, 'GPU')} of this node, of which {free:g} are free, and no more became free within {wait_s:g} s. "
            "Stop other jobs, or lower the number of processes."
        )


async def _wait_for(look: Callable[[], T], fits: Callable[[T], bool], wait_s: float) -> tuple[T, bool]:
    """Look until something fits or `wait_s` seconds have passed; returns the last look."""
    deadline = time.monotonic() + wait_s
    while not fits(seen := await asyncio.to_thread(look)):
        if time.monotonic() >= deadline:
            return seen, False
        await asyncio.sleep(_LOOK_S)
    return seen, True
