"""Costs of steps as rows and plots, computed by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_controller_bottleneck import Point
from harness.result_schema import kind_of
from ppo_step.compute import Workload
from ppo_step.planes import longest
from ppo_step.plots import plot_gains
from ppo_step.steps import Cost, ratio, summarise

MIB = 2**20
LOAD = Workload(family="tiny", layout="padded", rows=16, workers=2, compute_s=1.0)


def cost(wall: float, cpu: float = 1.0, nbytes: int = MIB) -> Cost:
    return Cost(
        wall_s=wall,
        stage_s={"rollout": wall / 4, "clear": wall * 3 / 4},
        driver_bytes=nbytes,
        driver_rss_mib=5.0,
        driver_cpu_s=cpu,
        plane_cpu_s=cpu,
        worker_cpu_s=cpu,
        computed_s=1.0,
    )


COSTS = {"driver": [cost(4.0), cost(8.0), cost(6.0)], "simple": [cost(2.0, 0.5), cost(2.0, 0.5), cost(1.5, 0.5)]}


def test_the_median_of_paired_ratios_is_not_the_ratio_of_medians():
    assert ratio(COSTS, "driver", "simple") == 4.0  # of 2, 4, 4; the medians give 3
    assert ratio(COSTS, "driver", "simple", "cpu_s") == 2.0


def test_a_row_by_hand():
    driver, ours = summarise(COSTS, LOAD, step_bytes=3 * MIB)
    assert "times_faster" not in driver
    assert (driver["step_s"], driver["all_cpu_s"], driver["driver_mib"], driver["mib"]) == (6.0, 3.0, 1.0, 3.0)
    assert driver["transfer_share"] == pytest.approx(5 / 6, rel=1e-3)  # one second of six is compute
    assert ours["transfer_share"] == 0.5
    assert (ours["times_faster"], ours["gain_percent"], ours["times_less_cpu"]) == (4.0, 300.0, 2.0)
    assert driver["stage_s"] == {"rollout": 1.5, "clear": 4.5}
    assert driver["stage_p50_ms"] == 2500.0  # of 1, 1.5, 2, 3, 4.5, 6 s
    assert (driver["compute"], driver["compute_s"]) == ("slept", 1.0)
    assert kind_of(ours).name == "step"


def test_what_each_stage_computed_counts_with_its_slowest_worker():
    assert longest([{"rollout": 1.0, "ref": 0.5}, {"rollout": 2.0}, {"adv": 0.25}]) == {
        "rollout": 2.0,
        "ref": 0.5,
        "adv": 0.25,
    }


def test_a_plot_for_each_axis_that_varies(tmp_path: Path):
    rows = [row | {"mib": mib} for mib in (1.0, 2.0) for row in summarise(COSTS, LOAD, step_bytes=MIB)]
    plot_gains(rows[:2], tmp_path / "one.json")
    assert not (tmp_path / "one.png").exists()
    plot_gains(rows, tmp_path / "two.json")
    assert (tmp_path / "two.png").read_bytes().startswith(b"\x89PNG")


def test_a_point_says_how_large_its_steps_are():
    point = Point("vl", "padded", 256, 4, "none")
    assert abs(point.step_bytes / (256 * MIB) - 1) < 0.1
    assert point.workload().rows % 16 == 0
    assert Point("vl", "ragged", 16, 4, "real").workload().real
