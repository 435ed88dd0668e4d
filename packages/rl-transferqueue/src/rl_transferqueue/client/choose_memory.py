"""Choose how a client reaches a plane: through this host's memory and sockets, or by network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from rl_protocol.errors import ConfigError
from rl_transferqueue.backends import BUILT_IN
from rl_transferqueue.client.backend_memory import BackendMemory
from rl_transferqueue.client.memory_interface import OnMoved, PlaneMemory
from rl_transferqueue.client.other_host_memory import HostsMemory, RemoteMemory
from rl_transferqueue.client.retries.ask_for_successor import ask_for_successor
from rl_transferqueue.client.retries.find_successor import find_successor
from rl_transferqueue.client.same_host_memory import LocalMemory
from rl_transferqueue.transport.bulk_client import BulkConnection, dial
from rl_transferqueue.transport.plane_secret import PlaneKey, load_key
from rl_transferqueue.transport.unix_link import Link, connect_unix
from rl_transferqueue.transport.zmq_link import ZmqLink
from rl_transferqueue.wire.descriptor import ControllerAddress, PlaneDescriptor, UnitAddress
from rl_transferqueue.wire.process_liveness import lifeline, open_pidfd

Server: TypeAlias = ControllerAddress | UnitAddress


@dataclass(frozen=True, slots=True)
class Route:
    """The route to the processes of a plane: memory and sockets of this host, or the network.

    Control messages to another host are encrypted if there is a key. Idle bulk connections serve as
    lifelines of processes there.
    """

    descriptor: PlaneDescriptor
    key: PlaneKey
    session: bytes

    @property
    def here(self) -> bool:
        """Whether the controller is on this host, and shares its memory."""
        return self.descriptor.shares_memory(self.descriptor.host)

    @property
    def maps_memory(self) -> bool:
        """Whether this process maps memory of the plane."""
        return self.here or bool(self._near())

    @property
    def or_else(self) -> str:
        """For messages: why the controller's lifeline may end while the controller runs."""
        return "" if self.here else " or can't be reached any more"

    def connect(self) -> Link:
        """Connect to the controller; one on another host that is missing is noticed later.

        Raises:
            PlaneLostError: the controller does not run.
        """
        controller = self.descriptor.controller
        if self.here:
            return connect_unix(controller.address, self.session, "controller")
        return ZmqLink(controller.control, self.session, self.key, controller.incarnation)

    async def lifeline(self, server: Server, name: str, timeout_s: float) -> int:
        """A file descriptor that becomes readable when the process ends; the caller closes it.

        Raises:
            PlaneLostError: the process has already ended.
            PlaneTimeout, ConfigError: see `dial`.
        """
        host = server.host if isinstance(server, UnitAddress) else self.descriptor.host
        if self.descriptor.shares_memory(host):
            if self.descriptor.backend == "memory":
                return lifeline(self.descriptor.plane)
            return open_pidfd(server.process, f"The {name} of the data plane")
        dialing = asyncio.get_running_loop().run_in_executor(
            None, dial, server, host, name, self.key, self.session, timeout_s
        )
        try:
            return (await asyncio.shield(dialing)).lifeline()
        except asyncio.CancelledError:
            dialing.add_done_callback(_close_connection)
            raise

    async def find_successor(self, deadline: float, still_runs: Callable[[], bool] = lambda: False) -> PlaneDescriptor:
        """The descriptor with a later controller, once it is there: in a file of the controller's
        host, or asked for at its address.

        Raises:
            PlaneLostError: see `rl_transferqueue.client.retries.find_successor.find_successor`.
        """
        if self.here:
            return await find_successor(self.descriptor, deadline, still_runs)
        return await ask_for_successor(self.descriptor, self.key, deadline)

    def memory(self, on_moved: OnMoved, on_replaced: Callable[[], object]) -> PlaneMemory:
        """The memory of the units; `on_replaced` is called when one of another host says that the
        controller has a successor."""
        if self.descriptor.backend not in BUILT_IN:
            return BackendMemory(self.descriptor)
        near = self._near()
        far = {unit: address for unit, address in enumerate(self.descriptor.units) if unit not in near}
        local = LocalMemory(near, on_moved)
        if not far:
            return local
        incarnation = self.descriptor.controller.incarnation
        remote = RemoteMemory(far, self.key, self.session, on_moved, incarnation, on_replaced)
        return HostsMemory(local, remote) if near else remote

    def _near(self) -> dict[int, UnitAddress]:
        """The units whose arenas this process maps."""
        if self.descriptor.backend not in BUILT_IN:
            return {}
        units = enumerate(self.descriptor.units)
        return {unit: address for unit, address in units if self.descriptor.shares_memory(address.host)}


def route(descriptor: PlaneDescriptor, session: bytes) -> Route:
    """The route for a session of this process.

    Raises:
        ConfigError: the plane is on another host and does not listen, or this process has no valid
            key.
    """
    found = Route(descriptor, PlaneKey(b""), session)
    if found.here and all(descriptor.shares_memory(unit.host) for unit in descriptor.units):
        return found
    if not descriptor.controller.control:
        raise ConfigError(
            "The data plane runs on another host (or in another pid namespace) and serves only its own host: set "
            "TransferQueueConfig.listen to an address of that host."
        )
    return replace(found, key=load_key())


def _close_connection(dialed: asyncio.Future[BulkConnection]) -> None:
    if not dialed.cancelled() and dialed.exception() is None:
        dialed.result().close()
