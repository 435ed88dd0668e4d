"""Check that the Ray cluster has room for the workers; actors without room would wait forever."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import ray

from rl_protocol import WorkerError

WAIT_S = 30.0
"""Seconds to wait for CPUs that other jobs hold."""
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


def free_cpus(timeout_s: float = LOOK_TIMEOUT_S) -> str:
    """The free CPUs of the cluster, in words; that Ray does not answer, after `timeout_s`."""
    answers = queue.SimpleQueue[Cpus]()
    threading.Thread(target=lambda: answers.put(cluster_cpus()), name="free CPUs", daemon=True).start()
    try:
        cpus = answers.get(timeout=timeout_s)
    except queue.Empty:
        return f"Ray does not say within {timeout_s:g} s which are free"
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
    deadline = time.monotonic() + wait_s
    while True:
        cpus = await asyncio.to_thread(look)
        needed = f"{workers} workers need {each:g} CPUs each, {workers * each:g} in all (ray.cpus_per_worker)"
        if sum(int(node // each) for node in cpus.per_node) < workers:
            raise WorkerError(
                f"{needed}; the Ray cluster has nodes of {', '.join(f'{node:g}' for node in cpus.per_node) or 'no'} CPUs, "
                f"{sum(cpus.per_node):g} in all. Lower ray.cpus_per_worker or rollout.num_workers, or add nodes."
            )
        if cpus.free >= workers * each:
            return
        if time.monotonic() >= deadline:
            raise WorkerError(
                f"{needed}; of {sum(cpus.per_node):g} CPUs of the Ray cluster {cpus.free:g} are free, and no more became free within "
                f"{wait_s:g} s. Stop other jobs, lower ray.cpus_per_worker, or set it to 0 to share CPUs."
            )
        await asyncio.sleep(_LOOK_S)
