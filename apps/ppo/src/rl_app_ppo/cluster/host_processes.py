"""The process of a run on each host other than the driver's, a Ray actor.

It starts the storage units of its host, reads the heartbeats there and kills what hangs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rl_app_ppo.cluster.heartbeats import HostBeats, OtherHost, Watched
from rl_app_ppo.cluster.ray_errors import reason_of
from rl_app_ppo.rank_network import RankNetwork, rank_interface
from rl_protocol import RLError, WorkerError
from rl_transferqueue import HostUnits, TransferQueueConfig, start_host_units
from rl_transferqueue.transport.addresses import endpoint, listen_address
from rl_transferqueue.transport.plane_secret import load_key
from rl_transferqueue.wire.descriptor import UnitAddress


class StartedUnits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The storage units of a host."""

    addresses: tuple[UnitAddress, ...]
    heartbeats: dict[int, str]
    """Process id -> file of its heartbeat."""


class HostProcess:
    """Watches the heartbeats of its host, and starts the storage units, which end with it."""

    def __init__(self) -> None:
        self._beats = HostBeats()
        self._units: HostUnits | None = None

    def start_units(self, settings: TransferQueueConfig, network: bytes, logs: Path) -> bytes:
        """Start the units at the address of this host in `network`, a RankNetwork.

        Returns:
            StartedUnits, msgpack.

        Raises:
            ConfigError, PlaneLostError: see `start_host_units`.
        """
        host = rank_interface(msgspec.msgpack.decode(network, type=RankNetwork)).address
        port = listen_address(settings.listen, load_key()).port
        here = replace(settings, listen=endpoint(host, port) if port else host)
        self._units = start_host_units(here, log_dir=logs)
        beats = {pid: str(file) for pid, file in self._units.heartbeats.items()}
        return msgspec.msgpack.encode(StartedUnits(addresses=self._units.addresses, heartbeats=beats))

    def counts(self, files: Mapping[int, Path]) -> dict[int, int]:
        """See `HostBeats.counts`."""
        return self._beats.counts(files)

    def kill(self, pid: int) -> bool:
        """See `HostBeats.kill`."""
        return self._beats.kill(pid)


class HostProcesses:
    """The driver's handles of the HostProcess of each other host.

    Each starts when it is first needed.

    Lifecycle: until `close`, or the end of their hosts.

    Attributes:
        units: the storage units that run on other hosts.
    """

    def __init__(self) -> None:
        self._actors: dict[OtherHost, Any] = {}
        self.units: list[Watched] = []

    async def start_units(
        self,
        settings: TransferQueueConfig,
        hosts: Mapping[OtherHost, RankNetwork],
        logs: Path,
        timeout_s: float,
    ) -> list[UnitAddress]:
        """Start storage units on each host.

        Args:
            settings: of the data plane.
            hosts: and through which network the controller reaches each.
            logs: folder of the logs of a run.
            timeout_s: longest wait, seconds.

        Raises:
            ConfigError, PlaneLostError: see `start_host_units`.
            WorkerError: a host starts no process, or not within `timeout_s`.
        """

        async def start(number: int, host: OtherHost, network: bytes) -> StartedUnits:
            with self._errors(host, f"The storage units of the data plane on {host} did not start"):
                try:
                    async with asyncio.timeout(timeout_s):
                        answer = self._actor(host).start_units.remote(settings, network, logs / f"units-{number}")
                        return msgspec.msgpack.decode(await answer, type=StartedUnits)
                except TimeoutError:
                    raise WorkerError(
                        f"The storage units of the data plane on {host} did not start within {timeout_s:g} s (ray.start_timeout_s)."
                    ) from None

        numbered = enumerate(hosts.items(), start=1)
        started = await asyncio.gather(*(start(n, host, msgspec.msgpack.encode(net)) for n, (host, net) in numbered))
        for host, units in zip(hosts, started, strict=True):
            for number, (pid, file) in enumerate(units.heartbeats.items()):
                name = f"Storage unit {number} of the data plane on {host}"
                self.units.append(Watched(name, pid, Path(file), host))
        return [unit for units in started for unit in units.addresses]

    async def counts(self, host: OtherHost, files: Mapping[int, Path]) -> Mapping[int, int]:
        """The counts of processes of a host; see `HostBeats.counts`.

        Raises:
            WorkerError: its HostProcess has ended, or did not start; the next call starts another.
        """
        with self._errors(host, f"The heartbeats of {host} can't be read"):
            return await self._actor(host).counts.remote(files)

    async def kill(self, host: OtherHost, pid: int) -> bool:
        """Kill a process of a host; see `HostBeats.kill`.

        Raises:
            WorkerError: as `counts`.
        """
        with self._errors(host, f"Process {pid} of {host} can't be killed"):
            return await self._actor(host).kill.remote(pid)

    def close(self) -> None:
        """Kill the processes, and the units with them."""
        while self._actors:
            ray.kill(self._actors.popitem()[1])

    def _actor(self, host: OtherHost) -> Any:
        if host not in self._actors:
            self._actors[host] = self._start(host)
        return self._actors[host]

    def _start(self, host: OtherHost) -> Any:
        there = NodeAffinitySchedulingStrategy(host.node, soft=False)
        actor_class: Any = ray.remote(HostProcess)
        return actor_class.options(num_cpus=0, max_restarts=0, scheduling_strategy=there).remote()

    @contextmanager
    def _errors(self, host: OtherHost, what: str) -> Generator[None]:
        """Translate the errors of Ray, and forget an actor that has ended.

        Raises:
            RLError: raised by the actor.
            WorkerError: `what`, and why.
        """
        try:
            yield
        except RayTaskError as error:
            cause: object = getattr(error, "cause", None)
            if isinstance(cause, RLError):
                raise cause from None
            raise WorkerError(f"{what}: {type(cause).__name__}: {cause}") from None
        except RayError as error:
            self._actors.pop(host, None)
            raise WorkerError(f"{what}: {reason_of(error)}") from None
