"""A Ray cluster of two nodes on this machine."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import pytest


@contextmanager
def two_nodes(*marks: str, **each: int) -> Generator[str]:
    """Start two nodes with these resources; yields the address of the cluster.

    With two marks, their processes are on two hosts (RL_HOST), which share no memory.
    """
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        node = {"object_store_memory": 80 << 20, **each}
        first, second = ({"env_vars": {"RL_HOST": mark}} for mark in marks) if marks else ({}, {})
        started = Cluster(initialize_head=True, head_node_args={**node, **first, "include_dashboard": False})
        try:
            started.add_node(**node, **second)
            yield started.address
        finally:
            started.shutdown()
