"""Storage units of the data plane on the other hosts of a run, one Ray actor for each host."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rl_app_ppo.cluster.ray_errors import reason_of
from rl_app_ppo.worker.messages import RankNetwork
from rl_app_ppo.worker.rank_network import rank_interface
from rl_protocol import RLError, WorkerError
from rl_transferqueue import HostUnits, TransferQueueConfig, start_host_units
from rl_transferqueue.transport.addresses import endpoint, listen_address
from rl_transferqueue.transport.plane_secret import load_key
from rl_transferqueue.wire.descriptor import UnitAddress

T = TypeVar("T")


class UnitsProcess:
    """Starts the storage units of its host, which end with it."""

    def __init__(self) -> None:
        self._units: HostUnits | None = None

    def start(self, settings: TransferQueueConfig, network: bytes, logs: Path) -> bytes:
        """Start the units at the address of this host in `network`, a RankNetwork.

        Returns:
            Their UnitAddress each, msgpack.

        Raises:
            ConfigError, PlaneLostError: see `start_host_units`.
        """
        host = rank_interface(msgspec.msgpack.decode(network, type=RankNetwork)).address
        port = listen_address(settings.listen, load_key()).port
        here = replace(settings, listen=endpoint(host, port) if port else host)
        self._units = start_host_units(here, log_dir=logs)
        return msgspec.msgpack.encode(self._units.addresses)


@dataclass(frozen=True)
class OtherHost:
    """A host of the run that is not the driver's.

    Attributes:
        name: of the host, in messages.
        node: Ray's id of the node.
        network: through which the controller reaches it.
    """

    name: str
    node: str
    network: RankNetwork


class PlaneUnits:
    """The driver's handles of the storage units of other hosts.

    Lifecycle: `start`, then they run until `close`, or the end of their hosts.

    Args:
        settings: of the data plane.
        logs: folder of the logs of a run.
    """

    def __init__(self, settings: TransferQueueConfig, logs: Path) -> None:
        self._settings = settings
        self._logs = logs
        self._actors: list[Any] = []

    async def start(self, hosts: Mapping[str, OtherHost], timeout_s: float) -> list[UnitAddress]:
        """Start the units of each host, by its `this_host`.

        Raises:
            ConfigError, PlaneLostError: see `start_host_units`.
            WorkerError: a host starts no process, or not within `timeout_s` seconds.
        """
        found = await asyncio.gather(
            *(self._start(number, host, timeout_s) for number, host in enumerate(hosts.values(), start=1))
        )
        return [unit for units in found for unit in units]

    def close(self) -> None:
        """Kill the units."""
        while self._actors:
            ray.kill(self._actors.pop())

    async def _start(self, number: int, host: OtherHost, timeout_s: float) -> list[UnitAddress]:
        there = NodeAffinitySchedulingStrategy(host.node, soft=False)
        actor_class: Any = ray.remote(UnitsProcess)
        actor = actor_class.options(num_cpus=0, max_restarts=0, scheduling_strategy=there).remote()
        self._actors.append(actor)
        network, logs = msgspec.msgpack.encode(host.network), self._logs / f"units-{number}"
        answer = await _answered(actor.start.remote(self._settings, network, logs), host, timeout_s)
        return msgspec.msgpack.decode(answer, type=list[UnitAddress])


async def _answered(answer: Awaitable[T], host: OtherHost, timeout_s: float) -> T:
    what = f"The storage units of the data plane on {host.name}"
    try:
        async with asyncio.timeout(timeout_s):
            return await answer
    except TimeoutError:
        raise WorkerError(f"{what} did not start within {timeout_s:g} s (ray.start_timeout_s).") from None
    except RayTaskError as error:
        cause: object = getattr(error, "cause", None)
        if isinstance(cause, RLError):
            raise cause from None
        raise WorkerError(f"{what} did not start: {type(cause).__name__}: {cause}") from None
    except RayActorError as error:
        raise WorkerError(f"{what} did not start: {reason_of(error)}") from None
