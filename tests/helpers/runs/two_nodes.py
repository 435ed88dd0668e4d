"""A Ray cluster of several nodes on this machine."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def two_nodes(*marks: str, **each: int) -> Generator[str]:
    """Start two nodes with these resources; yields the address of the cluster.

    With two marks, their processes are on two hosts (RL_HOST), which share no memory.
    """
    first, second = ({"env_vars": {"RL_HOST": mark}} for mark in marks) if marks else ({}, {})
    with several_nodes({**each, **first}, {**each, **second}) as cluster:
        yield cluster.address


@contextmanager
def several_nodes(head: dict[str, Any], *others: dict[str, Any]) -> Generator[Any]:
    """Start nodes with these resources; yields the ray.cluster_utils.Cluster."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        store = {"object_store_memory": 80 << 20}
        # without a port Ray looks for a free one, although it serves no dashboard
        alone = {"include_dashboard": False, "dashboard_port": None}
        started = Cluster(initialize_head=True, head_node_args={**store, **head, **alone})
        try:
            for node in others:
                started.add_node(**store, **node)
            yield started
        finally:
            started.shutdown()
