"""The limits of a container and of a batch job, in both versions of Linux's control groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from rl_protocol.support.host import control_groups
from rl_protocol.support.host.control_groups import core_quota, memory_left
from rl_protocol.support.host.this_process import usable_cores

GIB = 2**30
Host = Callable[[str, Mapping[str, str]], None]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """Sets what /proc/self/cgroup and the files below /sys/fs/cgroup say."""

    def write(membership: str, files: Mapping[str, str]) -> None:
        (tmp_path / "membership").write_text(membership)
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(f"{text}\n")

    monkeypatch.setattr(control_groups, "_MOUNTS", tmp_path)
    monkeypatch.setattr(control_groups, "_MEMBERSHIP", tmp_path / "membership")
    return write


def test_a_container_of_version_2(host: Host) -> None:
    files = {
        "memory.max": str(4 * GIB),
        "memory.current": str(3 * GIB),
        "memory.stat": f"anon {GIB}\ninactive_file {GIB - 512}\nactive_file 512",
    }
    host("0::/\n", {**files, "cpu.max": "250000 100000"})
    assert (memory_left(), core_quota()) == (2 * GIB, 2)


@pytest.mark.parametrize("path", ["/", "/kubepods/pod1/c1"])
def test_a_container_of_version_1_has_its_own_group_as_root(host: Host, path: str) -> None:
    memory = {
        "limit_in_bytes": str(4 * GIB),
        "usage_in_bytes": str(GIB),
        "stat": f"inactive_file 1\ntotal_inactive_file {GIB}",
    }
    host(
        f"9:name=systemd:{path}\n5:cpu,cpuacct:{path}\n4:memory:{path}\n0::{path}\n",
        {
            **{f"memory/memory.{name}": text for name, text in memory.items()},
            "cpu/cpu.cfs_quota_us": "50000",
            "cpu/cpu.cfs_period_us": "100000",
        },
    )
    assert (memory_left(), core_quota()) == (4 * GIB, 1)


def test_the_smallest_of_nested_groups_counts(host: Host) -> None:
    step = {"memory.max": "max", "memory.current": "0", "memory.stat": "inactive_file 0", "cpu.max": "max 100000"}
    job = {
        "memory.max": str(GIB),
        "memory.current": str(2 * GIB),
        "memory.stat": "inactive_file 0",
        "cpu.max": "800000 100000",
    }
    host(
        "0::/slurm/job_1/step_0\n",
        {
            **{f"slurm/job_1/step_0/{name}": text for name, text in step.items()},
            **{f"slurm/job_1/{name}": text for name, text in job.items()},
            "slurm/cpu.max": "1600000 100000",
        },
    )
    assert (memory_left(), core_quota()) == (0, 8)


def test_no_limits(host: Host) -> None:
    host("0::/user\n", {"user/memory.max": "max", "user/memory.current": "5", "user/cpu.max": "max 100000"})
    assert (memory_left(), core_quota()) == (None, None)
    host("2:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"})
    assert (memory_left(), core_quota()) == (None, None)


def test_a_system_without_control_groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(control_groups, "_MEMBERSHIP", tmp_path / "none")
    assert (memory_left(), core_quota()) == (None, None)


def test_the_quota_bounds_the_cores_of_this_process(host: Host) -> None:
    host("0::/\n", {"cpu.max": "100000 100000"})
    assert usable_cores() == 1
