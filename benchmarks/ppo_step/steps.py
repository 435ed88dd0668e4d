"""One step on one plane, and its costs."""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from harness.pairs import cpu_seconds

from ppo_step.cluster import Cluster, ray_pids
from ppo_step.compute import Workload
from ppo_step.planes import WAIT_S, Plan, Plane


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The costs of one step."""

    wall_s: float
    stage_s: Mapping[str, float]
    driver_bytes: int
    driver_rss_mib: float
    """Rise of the driver's resident memory, without pages of Ray's store mapped before."""
    driver_cpu_s: float
    plane_cpu_s: float
    """CPU of the plane's own processes, and of Ray's."""
    worker_cpu_s: float
    computed_s: float
    """Part of the wall time in which the slowest worker of a stage computed or slept."""

    @property
    def cpu_s(self) -> float:
        return self.driver_cpu_s + self.plane_cpu_s + self.worker_cpu_s


def run_step(plane: Plane, plan: Plan, step: int) -> dict[str, float]:
    """Run all stages in order; seconds of each and of clearing the rows."""
    seconds: dict[str, float] = {}
    for stage in plan.graph.stages:
        start = time.perf_counter()
        plane.run(stage, step)
        seconds[stage.name] = time.perf_counter() - start
    start = time.perf_counter()
    plane.finish(step)
    return seconds | {"clear": time.perf_counter() - start}


def measure(cluster: Cluster, name: str, plan: Plan, step: int) -> Cost:
    """Run a step and return its costs."""
    plane, me = cluster.planes[name], os.getpid()
    groups = {"driver": [me], "plane": [*cluster.pids[name](), *ray_pids()], "worker": cluster.worker_pids}
    resident = _forget_peak()
    before, moved = {group: cpu_seconds(pids) for group, pids in groups.items()}, plane.bytes_moved
    start = time.perf_counter()
    stages = run_step(plane, plan, step)
    wall = time.perf_counter() - start
    spent = {f"{group}_cpu_s": cpu_seconds(pids) - before[group] for group, pids in groups.items()}
    return Cost(
        wall_s=wall,
        stage_s=stages,
        driver_bytes=plane.bytes_moved - moved,
        driver_rss_mib=_status_mib("VmHWM") - resident,
        computed_s=sum(plane.computed().values()),
        **spent,
    )


def _forget_peak() -> float:
    """Return free memory, reset the peak; resident MiB now."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status_mib("VmRSS")


def _status_mib(name: str) -> float:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(f"{name}:"))
    return int(line.split()[1]) / 1024


def train(cluster: Cluster, name: str, workload: Workload, steps: int) -> list[str]:
    """Reset the real policies, run steps on one plane; digests of all workers' parameters."""
    plan = cluster.load(workload)
    for step in range(1, steps + 1):
        run_step(cluster.planes[name], plan, step)
    workers = cluster.workers[: workload.workers]
    return ray.get([worker.digest.remote() for worker in workers], timeout=WAIT_S)


def compare(cluster: Cluster, workload: Workload, pairs: int, warm_up: int = 1) -> dict[str, list[Cost]]:
    """`pairs` steps on every plane, in turns of changing order."""
    plan, names = cluster.load(workload), list(cluster.planes)
    costs: dict[str, list[Cost]] = {name: [] for name in names}
    step = 0
    for turn in range(-warm_up, pairs):
        for name in names if turn % 2 else names[::-1]:
            step += 1
            cost = measure(cluster, name, plan, step)
            if turn >= 0:
                costs[name].append(cost)
    return costs


def ratio(costs: Mapping[str, Sequence[Cost]], of: str, to: str, what: str = "wall_s") -> float:
    """Median of the paired ratios of a cost of `of` to that of `to`."""
    pairs = zip(costs[of], costs[to], strict=True)
    return statistics.median(getattr(a, what) / max(getattr(b, what), 1e-9) for a, b in pairs)


def summarise(
    costs: Mapping[str, Sequence[Cost]], workload: Workload, step_bytes: int, base: str = "driver"
) -> list[dict[str, Any]]:
    """One row per plane: medians, and ratios to the central driver if it took part."""
    point = {
        "family": workload.family,
        "layout": workload.layout,
        "mib": round(step_bytes / 2**20, 1),
        "rows_per_step": workload.rows,
        "workers": workload.workers,
        "compute": "real" if workload.real else "slept" if workload.compute_s else "none",
        "compute_s": round(workload.compute_s, 3),
    }
    return [{**point, "plane": name, **_row(costs, name, base)} for name in costs]


def _row(costs: Mapping[str, Sequence[Cost]], name: str, base: str) -> dict[str, Any]:
    mine = costs[name]

    def median(what: str) -> float:
        return _short(statistics.median(getattr(cost, what) for cost in mine))

    calls = [seconds for cost in mine for seconds in cost.stage_s.values()]
    row: dict[str, Any] = {
        "pairs": len(mine),
        "step_s": median("wall_s"),
        "computed_s": median("computed_s"),
        "transfer_share": _short(statistics.median(1 - c.computed_s / c.wall_s for c in mine)),
        "stage_p50_ms": _short(float(np.quantile(calls, 0.5)) * 1e3),
        "stage_p99_ms": _short(float(np.quantile(calls, 0.99)) * 1e3),
        "driver_mib": _short(statistics.median(c.driver_bytes for c in mine) / 2**20),
        "driver_rss_mib": median("driver_rss_mib"),
        "driver_cpu_s": median("driver_cpu_s"),
        "plane_cpu_s": median("plane_cpu_s"),
        "all_cpu_s": median("cpu_s"),
        "stage_s": {stage: _short(statistics.median(c.stage_s[stage] for c in mine)) for stage in mine[0].stage_s},
    }
    if base in costs and name != base:
        speedup = ratio(costs, base, name)
        row |= {
            "times_faster": _short(speedup),
            "times_less_cpu": _short(ratio(costs, base, name, "cpu_s")),
            "gain_percent": _short(100 * (speedup - 1)),
        }
    return row


def _short(value: float) -> float:
    return float(f"{value:.4g}")
