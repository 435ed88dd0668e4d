"""A placement that the cluster can't provide is an error before anything waits for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from rl_app_ppo.cluster.placement import Cpus, cluster_cpus, require_cpus, require_free_gpus
from rl_protocol import WorkerError


def test_workers_that_fit_are_let_through() -> None:
    asyncio.run(require_cpus(4, 2.0, lambda: Cpus([4, 5], 8.0)))
    asyncio.run(require_cpus(3, 0.5, lambda: Cpus([2], 1.5)))


def test_shared_cpus_are_not_looked_at() -> None:
    def nobody_asks() -> Cpus:
        raise AssertionError

    asyncio.run(require_cpus(100, 0.0, nobody_asks))


@pytest.mark.parametrize(("nodes", "free"), [([3, 3], 6.0), ([2], 2.0), ([], 0.0)])
def test_what_can_never_be_placed_is_an_error_at_once(nodes: list[float], free: float) -> None:
    """Two nodes of three CPUs have room for two workers with two CPUs each, not for three."""
    with pytest.raises(WorkerError, match=r"need 6 CPUs, 2 for each of 3 workers \(ray\.cpus_per_worker\); ") as error:
        asyncio.run(require_cpus(3, 2.0, lambda: Cpus(nodes, free)))
    assert f"{sum(nodes):g} in all." in str(error.value)


def test_cpus_that_others_hold_are_waited_for_and_then_named() -> None:
    looks: Iterator[Cpus] = iter([Cpus([4], 1.0), Cpus([4], 4.0)])
    asyncio.run(require_cpus(2, 2.0, lambda: next(looks), wait_s=600))
    began = time.monotonic()
    with pytest.raises(
        WorkerError, match=r"need 4 CPUs, 2 for each of 2 workers .* of 4 CPUs .* 1 are free.* within 0\.1 s"
    ):
        asyncio.run(require_cpus(2, 2.0, lambda: Cpus([4], 1.0), wait_s=0.1))
    assert time.monotonic() - began < 60


def test_gpus_that_others_hold_are_waited_for_and_then_named() -> None:
    looks = iter([1.0, 2.0])
    asyncio.run(require_free_gpus(2, lambda: next(looks), wait_s=600))
    with pytest.raises(WorkerError, match=r"need 2 GPUs of this node, of which 1 are free.* within 0\.1 s"):
        asyncio.run(require_free_gpus(2, lambda: 1.0, wait_s=0.1))


def test_a_run_without_gpus_looks_for_none() -> None:
    def nobody_asks() -> float:
        raise AssertionError

    asyncio.run(require_free_gpus(0, nobody_asks))


@pytest.mark.slow
def test_a_real_cluster_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False)
    try:
        assert cluster_cpus() == Cpus([2.0], 2.0)
        asyncio.run(require_cpus(2, 1.0))
        with pytest.raises(WorkerError, match=r"need 5 CPUs, 1 for each of 5 workers.*nodes of 2 CPUs, 2 in all"):
            asyncio.run(require_cpus(5, 1.0))
    finally:
        ray.shutdown()
