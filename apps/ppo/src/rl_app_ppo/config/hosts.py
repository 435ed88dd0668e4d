"""The hosts of a run with trainer.nnodes above 1: which processes share one, and what it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rl_app_ppo.config.placement import WorkerGroup
from rl_app_ppo.config.schema import AppConfig
from rl_protocol import ConfigError
from rl_protocol.counted import counted
from rl_trainer.config.backends import MegatronConfig
from rl_transferqueue import TransferQueueConfig

NODES_KEY, GPUS_KEY = "trainer.nnodes", "trainer.n_gpus_per_node"
_SOME_CPU = 0.01


@dataclass(frozen=True, slots=True)
class HostBundle:
    """What the processes of one host need together: a bundle of Ray's placement group.

    Attributes:
        number: the host, from 1.
        processes: their names.
        gpus: GPUs.
        cpus: CPUs.
    """

    number: int
    processes: tuple[str, ...]
    gpus: int
    cpus: float

    @property
    def reserved_cpus(self) -> float:
        """CPUs to reserve; never 0, since Ray refuses bundles without resources."""
        return self.cpus or _SOME_CPU

    def __str__(self) -> str:
        return f"host {self.number}: {_resources(self.gpus, self.cpus)} ({', '.join(self.processes)})"


@dataclass(frozen=True, slots=True)
class NodeResources:
    """What a node of the Ray cluster has."""

    address: str
    gpus: int
    cpus: float

    def __str__(self) -> str:
        return f"{self.address}: {_resources(self.gpus, self.cpus)}"


def _resources(gpus: int, cpus: float) -> str:
    return f"{counted(gpus, 'GPU')}, {cpus:g} CPU{'s' * (cpus != 1)}"


def hosts_of(
    config: AppConfig,
    processes: Sequence[tuple[WorkerGroup, int]],
    gpus: Sequence[int],
    gpus_per_host: int,
    lenders: Sequence[Sequence[int]],
) -> list[int | None]:
    """The host of each process, from 0; None: no host has enough GPUs left for it.

    Processes with GPUs fill one host after the other, in their order. The tensor-parallel ranks of
    Megatron, and those of a vLLM replica, are on one host. Ranks and replicas on the CPU are spread
    evenly.

    Args:
        config: says how many hosts there are.
        processes: group and rank of each.
        gpus: GPUs of each.
        gpus_per_host: GPUs of a host that may be used.
        lenders: earlier processes whose GPUs each uses; it is on the host of the first.
    """
    hosts = list[int | None]()
    left = [gpus_per_host] * config.trainer.nnodes
    for (group, rank), wanted, lent in zip(processes, gpus, lenders, strict=True):
        together = ranks_together(group, config)
        if lent:
            hosts.append(hosts[lent[0]])
        elif rank % together:  # it is with the first rank of its model replica
            hosts.append(hosts[-1])
        elif wanted:
            free = (host for host, count in enumerate(left) if count >= wanted * together)
            host = next(free, None)
            if host is not None:
                left[host] -= wanted * together
            hosts.append(host)
        else:
            hosts.append(rank // together * len(left) // (group.ranks // together))
    numbers = {host: number for number, host in enumerate(sorted({host for host in hosts if host is not None}))}
    return [None if host is None else numbers[host] for host in hosts]


def ranks_together(group: WorkerGroup, config: AppConfig) -> int:
    """Ranks of a group that share each layer, and so one of several hosts."""
    trains = bool(set(group.roles) & {"actor", "ref", "critic"})
    if config.trainer.nnodes == 1 or not trains or not isinstance(config.engine, MegatronConfig):
        return 1
    return config.engine.tensor_model_parallel_size


def units_join(settings: TransferQueueConfig) -> bool:
    """Whether hosts of a run have units of their own; other backends store rows in their own
    way."""
    return settings.backend == "simple"


def match_nodes(bundles: Sequence[HostBundle], nodes: Sequence[NodeResources]) -> None:
    """Check that each host can be another node of the cluster.

    Raises:
        ConfigError: there are too few nodes, or they are too small; names the host for which there
            is none, its processes, and the keys to change.
    """
    taken: dict[int, int] = {}

    def place(number: int, seen: set[int]) -> bool:
        """Take a node for a bundle, which may move other bundles (augmenting path)."""
        wanted = bundles[number]
        for i, node in enumerate(nodes):
            if i not in seen and node.gpus >= wanted.gpus and node.cpus >= wanted.reserved_cpus:
                seen.add(i)
                if i not in taken or place(taken[i], seen):
                    taken[i] = number
                    return True
        return False

    for number, bundle in enumerate(bundles):
        if not place(number, set()):
            shown = "; ".join(map(str, nodes)) or "none"
            raise ConfigError(
                f"The run needs {counted(len(bundles), 'host')} ({NODES_KEY}), and the Ray cluster has no node for {bundle}. Wanted: "
                f"{'; '.join(map(str, bundles))}. Nodes: {shown}. Add nodes, or lower {_remedies(bundle, nodes, len(bundles))}."
            )


def _remedies(bundle: HostBundle, nodes: Sequence[NodeResources], wanted: int) -> str:
    """The keys that make a bundle smaller."""
    if sum(node.cpus > 0 for node in nodes) < wanted:
        return NODES_KEY
    keys = list[str]()
    if sum(node.gpus >= bundle.gpus for node in nodes) < bundle.number:
        keys.append(GPUS_KEY)
    if sum(node.cpus >= bundle.cpus for node in nodes) < bundle.number:
        keys.append("ray.cpus_per_worker")
    return " or ".join(keys or [GPUS_KEY, "ray.cpus_per_worker"])
