"""Ray, the worker processes and all planes, alive at the same time to take turns."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import psutil
import ray
from peers.transferqueue import PeerPlane

from ppo_step.compute import Workload
from ppo_step.planes import WAIT_S, Central, Direct, Plan, Plane
from ppo_step.stores import CARRIERS
from ppo_step.workers import WorkerProcess
from rl_app_ppo.cluster.environment import compute_settings
from rl_transferqueue import TransferQueueConfig, start_local_plane

PLANES = (*CARRIERS, "transferqueue", "simple", "ray")
PEER_UNITS = 2
"""Storage units of every data plane; TransferQueue's default."""


@contextlib.contextmanager
def ray_session(store_bytes: int) -> Iterator[str]:
    """Start a local Ray with this object store; yields its address.

    The workers of all planes copy large memory as those of the app do.
    """
    settings = {
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
        "RAY_DEDUP_LOGS": "0",
        "GLIBC_TUNABLES": compute_settings(1)["GLIBC_TUNABLES"],
    }
    with mock.patch.dict(os.environ, settings):
        ray.init(
            address="local",
            object_store_memory=max(store_bytes, 80 << 20),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        try:
            yield ray.get_runtime_context().gcs_address
        finally:
            ray.shutdown()


def ray_pids() -> list[int]:
    """Ray's processes that move or keep objects: raylet, global control, object owners."""
    wanted = ("raylet", "gcs_server", "ray::_Holder")
    return [p.pid for p in psutil.Process().children(recursive=True) if _name(p).startswith(wanted)]


def _name(process: psutil.Process) -> str:
    try:
        command = process.cmdline()
    except psutil.Error:
        return ""
    return Path(command[0]).name if command else ""


class Cluster:
    """Workers and planes; `pids` maps a plane to its processes besides workers and driver."""

    def __init__(
        self, workers: Sequence[Any], planes: dict[str, Plane], pids: dict[str, Callable[[], list[int]]]
    ) -> None:
        self.workers, self.planes, self.pids = workers, planes, pids
        self.worker_pids: list[int] = ray.get([worker.pid.remote() for worker in workers], timeout=WAIT_S)

    def load(self, workload: Workload) -> Plan:
        """Prepare workers and planes for a point of the comparison."""
        packed = msgspec.msgpack.encode(workload)
        ray.get([worker.load.remote(packed) for worker in self.workers[: workload.workers]], timeout=WAIT_S)
        plan = Plan(workload)
        for plane in self.planes.values():
            plane.load(plan)
        return plan

    def join(self, meeting: Path) -> None:
        """Connect the real policies' process group; `meeting` is a path that doesn't exist yet."""
        world = len(self.workers)
        ray.get([worker.join.remote(f"file://{meeting}", world) for worker in self.workers], timeout=WAIT_S)


@contextlib.contextmanager
def cluster(names: Sequence[str], workers: int, step_bytes: int) -> Iterator[Cluster]:
    """Start what the named planes need for steps of up to `step_bytes`.

    Raises:
        ValueError: a plane that is not known.
    """
    if unknown := [name for name in names if name not in PLANES]:
        raise ValueError(f"There is no plane {unknown[0]!r}; choose from {', '.join(PLANES)}.")
    capacity = max(64, 2 * step_bytes >> 20)
    stored = 4 * step_bytes if {"ray", *CARRIERS} & set(names) else 0
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(ray_session(stored))
        made: list[Any] = [WorkerProcess.remote(rank) for rank in range(workers)]  # type: ignore[attr-defined]
        planes: dict[str, Plane] = {}
        pids: dict[str, Callable[[], list[int]]] = {}
        for name in names:
            if name in CARRIERS:
                planes[name], pids[name] = Central(name, made), list
            elif name == "transferqueue":
                peer = PeerPlane(PEER_UNITS)
                stack.callback(peer.close)
                planes[name], pids[name] = Direct(name, made, "peer", peer.info), lambda peer=peer: peer.pids
            else:
                where = address if name == "ray" else ""
                ours = stack.enter_context(
                    start_local_plane(
                        TransferQueueConfig(
                            capacity_mb=capacity, num_storage_units=PEER_UNITS, backend=name, backend_address=where
                        )
                    )
                )
                planes[name] = Direct(name, made, "ours", ours.descriptor.to_json())
                pids[name] = lambda ours=ours: list(ours.pids)
        yield Cluster(made, planes, pids)
