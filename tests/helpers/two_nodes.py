"""A Ray cluster of two nodes on this machine."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import pytest


@contextmanager
def two_nodes(**each: int) -> Generator[str]:
    """Start two nodes with these resources; yields the address of the cluster."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        node = {"object_store_memory": 80 << 20, **each}
        started = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        try:
            started.add_node(**node)
            yield started.address
        finally:
            started.shutdown()
