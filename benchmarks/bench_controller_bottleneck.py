"""Compare a step through a central driver with a step over a data plane.

    uv run --group bench benchmarks/bench_controller_bottleneck.py [--mib 256] [--workers 4]
        [--families vl] [--layouts padded] [--compute none] [--pairs 9] [--name floors] [--smoke]
        [--planes driver,driver-buffers,transferqueue,simple,ray]

All planes run the step graph of rl_trainer with the same worker processes, rows and padding:

    driver          verl's legacy way: collected through Ray, concatenated, reordered, chunked,
                    dispatched; pickled as DataProto is
    driver-buffers  the same, with columns that Ray pickles without a copy
    transferqueue   TransferQueue 0.1.11 (PyPI), two storage units
    simple, ray     rl_transferqueue with these backends, two storage units

Every worker reads one byte per page of what it gets. Lists (64,256) make every combination.
`--compute` is `none`, `real` (trains a tiny policy; ragged layout) or `share:N`: a sleep that makes
transfer N per cent of the driver plane's step. The planes take turns (harness/pairs.py), and the
result is the median of paired ratios. With several sizes or worker counts a plot is written.

`--same-training STEPS` shows that only the planes differ: it trains a tiny policy through each, and
exits with code 1 unless all parameters are equal, bit by bit.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
from typing import Any

from harness.pairs import publish, verdict
from ppo_step.cluster import PLANES, Cluster, cluster
from ppo_step.compute import Workload
from ppo_step.graph import step_graph, written
from ppo_step.payloads import FAMILIES, Layout, rows_for
from ppo_step.plots import plot_gains
from ppo_step.same_training import same_training
from ppo_step.steps import compare, ratio, summarise

SMOKE = ["--mib", "0.1", "--workers", "2", "--families", "tiny", "--pairs", "1"]


@dataclasses.dataclass(frozen=True)
class Point:
    """One combination of the options."""

    family: str
    layout: Layout
    mib: float
    workers: int
    compute: str

    def workload(self, compute_s: float = 0.0) -> Workload:
        """The workload sent to the workers."""
        return Workload(
            family=self.family,
            layout=self.layout,
            rows=rows_for(FAMILIES[self.family], self._columns, int(self.mib * 2**20)),
            workers=self.workers,
            compute_s=compute_s,
            real=self.compute == "real",
        )

    @property
    def step_bytes(self) -> int:
        """Padded bytes of all columns that a step writes."""
        return self.workload().rows * FAMILIES[self.family].row_bytes(self._columns)

    @property
    def _columns(self) -> tuple[str, ...]:
        return written(step_graph(FAMILIES[self.family]))


def calibrated(everything: Cluster, point: Point) -> float:
    """Seconds of sleep per step that make `share:N` true for the driver plane."""
    share = float(point.compute.partition(":")[2]) / 100
    alone = Cluster(everything.workers, {"driver": everything.planes["driver"]}, everything.pids)
    transfer = statistics.median(c.wall_s for c in compare(alone, point.workload(), pairs=3)["driver"])
    return transfer * (1 - share) / share


def run_point(everything: Cluster, point: Point, pairs: int) -> list[dict[str, Any]]:
    """Compare all planes at one point; rows with a bar come last."""
    sleep = calibrated(everything, point) if point.compute.startswith("share:") else 0.0
    workload = point.workload(sleep)
    costs = compare(everything, workload, pairs)
    rows = summarise(costs, workload, point.step_bytes)
    for row in rows:
        print({key: value for key, value in row.items() if key != "stage_s"}, flush=True)
    where = f"{point.family}, {point.step_bytes / 2**20:.0f} MiB per step, {point.workers} workers"
    if point.compute == "none" and point.mib == 256 and point.workers == 4:
        for peer, must, aim in (("driver", 40, 40), ("driver-buffers", 5, 5), ("transferqueue", 5, 10)):
            if {peer, "simple"} <= costs.keys():
                wall, cpu = (ratio(costs, peer, "simple", what) for what in ("wall_s", "cpu_s"))
                question = f"step without compute, {where} ({point.layout}): times faster than {peer}"
                rows.append(verdict(question, wall, must, aim, at_least=True, cpu_ratio=cpu))
    if point.mib >= 1024 and {"driver", "simple"} <= costs.keys():
        moved = {name: statistics.median(c.driver_bytes for c in costs[name]) / 2**20 for name in costs}
        rows.append(verdict(f"MiB through the driver, {where}: ours", moved["simple"], 1, 0.25, at_least=False))
        question = f"MiB through the driver, {where}: the legacy way, which ours is to save"
        rows.append(verdict(question, moved["driver"], 2048, 2048, at_least=True))
    return rows


def main() -> None:
    """Compare, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", default="256", help="MiB per step, of all columns, padded")
    parser.add_argument("--workers", default="4")
    parser.add_argument("--families", default="vl", help=", ".join(FAMILIES))
    parser.add_argument("--layouts", default="padded", help="padded, ragged: the same rows without the padding")
    parser.add_argument("--compute", default="none", help="none, real, share:N")
    parser.add_argument("--planes", default="driver,transferqueue,simple,ray", help=", ".join(PLANES))
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--name", default="point", help="of the result: controller_bottleneck_<name>")
    parser.add_argument("--same-training", type=int, default=0, metavar="STEPS", help="compare parameters instead")
    parser.add_argument("--smoke", action="store_true", help="a few KiB, one turn, nothing written")
    arguments = parser.parse_args()
    if arguments.same_training:
        trained = same_training(arguments.planes.split(","), arguments.same_training)
        if not arguments.smoke:
            publish("same_training", trained)
        return
    if arguments.smoke:
        arguments = parser.parse_args([*SMOKE, "--planes", arguments.planes, "--smoke"])
    asked = (arguments.families, arguments.layouts, arguments.mib, arguments.workers, arguments.compute)
    combinations = itertools.product(*(text.split(",") for text in asked))
    points = [Point(f, layout, float(mib), int(w), compute) for f, layout, mib, w, compute in combinations]  # type: ignore[arg-type]
    rows: list[dict[str, Any]] = []
    most = max(point.step_bytes for point in points)
    with cluster(arguments.planes.split(","), max(p.workers for p in points), most) as everything:
        for point in points:
            rows += run_point(everything, point, arguments.pairs)
    if not arguments.smoke:
        path = publish(f"controller_bottleneck_{arguments.name}", rows)
        if path is not None:
            plot_gains([row for row in rows if "plane" in row], path)


if __name__ == "__main__":
    main()
