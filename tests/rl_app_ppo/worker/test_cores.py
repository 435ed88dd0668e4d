"""The cores of a worker process."""

from __future__ import annotations

import pytest

from rl_app_ppo.worker.cores import cores_of_each


@pytest.mark.parametrize(("processes", "threads"), [(1, 6), (2, 3), (4, 1), (6, 1), (7, 1)])
def test_processes_that_compute_together_share_the_cores(monkeypatch, processes, threads):
    monkeypatch.setattr("rl_app_ppo.worker.cores.usable_cores", lambda: 6)
    assert cores_of_each(processes) == threads
