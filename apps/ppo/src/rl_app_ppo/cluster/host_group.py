"""A Ray placement group with one bundle for each host of a run (trainer.nnodes above 1)."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, TaskUnschedulableError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rl_app_ppo.config.hosts import HostBundle, NodeResources
from rl_protocol import ConfigError, WorkerError

WAIT_S = 30.0
"""Seconds to wait for what other jobs hold."""
_VERSIONS_S = 60.0
"""Seconds that a node has to start a process that tells its versions."""


class HostGroup:
    """The nodes of a run: another one for each bundle.

    Lifecycle: `open`, then processes start with the options of `bundle`; `close` ends them.

    Args:
        bundles: what each host needs.
    """

    def __init__(self, bundles: Sequence[HostBundle]) -> None:
        self._bundles = bundles
        self._group: PlacementGroup | None = None

    async def open(self, wait_s: float = WAIT_S) -> None:
        """Reserve the bundles, once other jobs have released what they need.

        Raises:
            WorkerError: other jobs held it for `wait_s` seconds.
        """
        wanted = [
            {"CPU": bundle.reserved_cpus} | ({"GPU": bundle.gpus} if bundle.gpus else {}) for bundle in self._bundles
        ]
        self._group = placement_group(wanted, strategy="STRICT_SPREAD")
        try:
            async with asyncio.timeout(wait_s):
                await self._group.ready()
        except TimeoutError:
            self.close()
            raise WorkerError(
                f"The hosts of the run were not free within {wait_s:g} s: {'; '.join(map(str, self._bundles))}. Nodes: "
                f"{'; '.join(map(str, free_nodes()))} free. Stop other jobs, or lower trainer.n_gpus_per_node or ray.cpus_per_worker."
            ) from None

    def bundle(self, host: int) -> dict[str, Any]:
        """Options of an actor on a host, from 0."""
        assert self._group is not None, "open() was called"
        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=host)}

    def missing_node(self, host: int) -> str:
        """What a host, from 0, needs a node for while it has none, since its node was lost; else
        empty."""
        assert self._group is not None, "open() was called"
        table: Any = placement_group_table(self._group)
        return "" if table["bundles_to_node_id"].get(host) in _alive() else str(self._bundles[host])

    def close(self) -> None:
        """Release the bundles, which kills their processes; safe to call twice."""
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None


def cluster_nodes() -> list[NodeResources]:
    """The nodes of the cluster that are alive."""
    return [
        NodeResources(node["NodeManagerAddress"], int(node["Resources"].get("GPU", 0)), node["Resources"].get("CPU", 0))
        for node in ray.nodes()
        if node["Alive"]
    ]


def free_nodes() -> list[NodeResources]:
    """What no job has reserved on each node."""
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    return [
        NodeResources(name, int(free.get(node, {}).get("GPU", 0)), free.get(node, {}).get("CPU", 0))
        for node, name in _alive().items()
    ]


def versions() -> dict[str, str]:
    """Versions of this process that all hosts of a run share."""
    return {"Python": platform.python_version(), "Ray": ray.__version__}


async def require_equal_versions() -> bool:
    """Compare the versions of Python and Ray on all nodes with those of this process.

    Returns:
        Whether all nodes told theirs; false: a node has ended meanwhile, so look at the nodes
        again. Ray notices the loss of a node up to half a minute late.

    Raises:
        ConfigError: those of a node differ; names it and both versions.
        WorkerError: a node starts no process.
    """
    ask: Any = ray.remote(num_cpus=0)(versions)
    nodes = _alive()
    answers = [
        ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote() for node in nodes
    ]
    try:
        found = await asyncio.to_thread(ray.get, answers, timeout=_VERSIONS_S)
    except GetTimeoutError:
        raise WorkerError(
            f"The nodes of the Ray cluster ({', '.join(nodes.values())}) did not all start a process within {_VERSIONS_S:g} s; see "
            "'ray status', and the logs of Ray on the nodes."
        ) from None
    except RayError as error:
        if isinstance(error, TaskUnschedulableError) or nodes.keys() - _alive().keys():
            return False
        raise WorkerError(f"A node of the Ray cluster starts no process: {str(error).splitlines()[0]}") from error
    compare_versions(versions(), dict(zip(nodes.values(), found, strict=True)))
    return True


def _alive() -> dict[str, str]:
    """Ray's id of each node -> its address."""
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def compare_versions(here: dict[str, str], nodes: dict[str, dict[str, str]]) -> None:
    """Check that all nodes have the versions of this process.

    Args:
        here: name -> version of this process.
        nodes: address of a node -> its versions.

    Raises:
        ConfigError: one has not.
    """
    others = [
        f"{what} {version} on {address}"
        for address, found in nodes.items()
        for what, version in found.items()
        if version != here[what]
    ]
    if others:
        own = ", ".join(f"{what} {version}" for what, version in here.items())
        raise ConfigError(
            f"All hosts of a run need the same versions: this one has {own}, and there is {'; '.join(others)}."
        )
