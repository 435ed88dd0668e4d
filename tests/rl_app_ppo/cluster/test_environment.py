"""Environment variables are set while a run lasts, and restored after it."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from rl_app_ppo.cluster.environment import compute_settings, environment, ray_settings


def test_variables_are_restored_also_after_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OLD", "1")
    monkeypatch.delenv("NEW", raising=False)
    seen: dict[str, str] = {}

    def run() -> None:
        with environment({"OLD": "2", "NEW": "3"}):
            seen.update(OLD=os.environ["OLD"], NEW=os.environ["NEW"])
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run()
    assert seen == {"OLD": "2", "NEW": "3"}
    assert os.environ["OLD"] == "1"
    assert "NEW" not in os.environ


def test_variables_that_libraries_set_during_a_run_are_restored(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "false")
    with environment({}):
        os.environ.update(PYTHONBREAKPOINT="ray.util.rpdb._driver_set_trace", MLFLOW_DISABLE_TELEMETRY="true")
    assert "PYTHONBREAKPOINT" not in os.environ
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "false"


def test_the_users_ray_settings_win_but_not_over_those_that_keep_ray_private(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "1")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    settings = ray_settings(local=True)
    assert settings["RAY_USAGE_STATS_ENABLED"] == "1"
    assert settings["RAY_AUTH_MODE"] == "token"
    assert "RAY_AUTH_MODE" not in ray_settings(local=False)


PUBLISHED = """
from ray._private.worker import print_to_stdstream
for line in ("A worker died or was killed while executing a task by an unexpected system error.", "2 nodes are dead"):
    print_to_stdstream({"lines": [line], "pid": "raylet", "is_err": False}, ignore_prefix=False)
"""


def test_ray_does_not_print_that_a_worker_has_died_and_prints_what_else_it_publishes(monkeypatch: pytest.MonkeyPatch):
    """The run says it itself. Importing the benchmarks' TransferQueue sets RAY_DEDUP_LOGS=0."""
    for name in ("RAY_DEDUP_LOGS", "RAY_DEDUP_LOGS_SKIP_REGEX"):
        monkeypatch.delenv(name, raising=False)
    started = [sys.executable, "-c", PUBLISHED]
    printed = subprocess.run(
        started, env=os.environ | ray_settings(local=True), capture_output=True, text=True, check=True
    ).stdout
    assert "2 nodes are dead" in printed
    assert "A worker died" not in printed


def test_waiting_threads_spin_for_a_short_time_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    kept = {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"}

    def threads(count: int):
        return {name: value for name, value in compute_settings(count).items() if name not in kept}

    assert threads(0) == {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "20000"}
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert threads(4) == {"OMP_NUM_THREADS": "4", "GOMP_SPINCOUNT": "7"}
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert threads(4) == {"OMP_NUM_THREADS": "4"}


FREED_TENSORS = """
import resource
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(2):  # the second time the memory is there
    before = faults()
    block = bytearray(64 << 20)
    del block
    found = faults() - before
print(found)
"""


def test_freed_memory_of_large_tensors_is_kept_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch):
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)

    def page_faults() -> int:
        settings = {**os.environ, **compute_settings(1)}
        command = [sys.executable, "-c", FREED_TENSORS]
        return int(subprocess.run(command, env=settings, check=True, capture_output=True, timeout=60).stdout)

    pages = (64 << 20) // resource.getpagesize()
    assert page_faults() < pages // 10
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1000000")
    assert compute_settings(1)["MALLOC_MMAP_THRESHOLD_"] == "1000000"


LOADER = Path("/lib64/ld-linux-x86-64.so.2")


@pytest.mark.skipif(not LOADER.exists(), reason="needs glibc on x86-64")
def test_processes_copy_large_memory_past_the_caches_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch):
    def threshold() -> int:
        """Bytes from which glibc copies past the caches, as a new process reads it."""
        listed = subprocess.run(
            [LOADER, "--list-tunables"], env=compute_settings(1), check=True, capture_output=True, text=True, timeout=60
        )
        line = next(x for x in listed.stdout.splitlines() if x.startswith("glibc.cpu.x86_non_temporal_threshold:"))
        return int(line.split()[1], 16)

    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert threshold() == 1 << 20
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.cpu.x86_non_temporal_threshold=0x40000")
    assert threshold() == 0x40000
