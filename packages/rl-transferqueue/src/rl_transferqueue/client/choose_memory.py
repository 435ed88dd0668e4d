"""Choose how a client reaches a plane: through this host's memory and sockets, or by network."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TypeAlias

from rl_protocol.errors import ConfigError
from rl_protocol.support.host_identity import this_host
from rl_transferqueue.backends import BUILT_IN
from rl_transferqueue.client.backend_memory import BackendMemory
from rl_transferqueue.client.memory_interface import PlaneMemory
from rl_transferqueue.client.other_host_memory import RemoteMemory
from rl_transferqueue.client.same_host_memory import LocalMemory
from rl_transferqueue.transport.bulk_client import BulkConnection, dial
from rl_transferqueue.transport.plane_secret import PlaneKey, load_key
from rl_transferqueue.transport.unix_link import Link, connect_unix
from rl_transferqueue.transport.zmq_link import ZmqLink
from rl_transferqueue.wire.descriptor import ControllerAddress, PlaneDescriptor, UnitAddress
from rl_transferqueue.wire.process_liveness import lifeline, open_pidfd

Server: TypeAlias = ControllerAddress | UnitAddress


@dataclass(frozen=True, slots=True)
class LocalRoute:
    """The route to a plane on this host."""

    descriptor: PlaneDescriptor
    session: bytes
    here = True
    or_else = ""

    def connect(self) -> Link:
        """Connect to the controller for control messages.

        Raises:
            PlaneLostError: the controller does not run.
        """
        return connect_unix(self.descriptor.controller.address, self.session, "controller")

    async def lifeline(self, server: Server, name: str, timeout_s: float) -> int:
        """A file descriptor that becomes readable when the process ends; the caller closes it.

        Raises:
            PlaneLostError: the process has already ended.
        """
        del timeout_s
        if self.descriptor.backend == "memory":
            return lifeline(self.descriptor.plane)
        return open_pidfd(server.process, f"The {name} of the data plane")

    def memory(self) -> PlaneMemory:
        """The memory of the units."""
        return stored(self.descriptor) or LocalMemory(self.descriptor.units)


@dataclass(frozen=True, slots=True)
class RemoteRoute:
    """The route to a plane on another host.

    Control messages are encrypted if there is a key. Idle bulk connections serve as lifelines.
    """

    descriptor: PlaneDescriptor
    key: PlaneKey
    session: bytes
    here = False
    or_else = " or can't be reached any more"

    def connect(self) -> Link:
        """Connect to the controller; a missing controller is noticed later."""
        return ZmqLink(self.descriptor.controller.control, self.session, self.key)

    async def lifeline(self, server: Server, name: str, timeout_s: float) -> int:
        """A connection that becomes readable when the process ends; the caller closes it.

        Raises:
            PlaneLostError, PlaneTimeout, ConfigError: see `dial`.
        """
        dialing = asyncio.get_running_loop().run_in_executor(
            None, dial, server, self.descriptor.host, name, self.key, self.session, timeout_s
        )
        try:
            return (await asyncio.shield(dialing)).lifeline()
        except asyncio.CancelledError:
            dialing.add_done_callback(_close_connection)
            raise

    def memory(self) -> PlaneMemory:
        """The memory of the units."""
        return stored(self.descriptor) or RemoteMemory(
            self.descriptor.host, self.descriptor.units, self.key, self.session
        )


def route(descriptor: PlaneDescriptor, session: bytes) -> LocalRoute | RemoteRoute:
    """The route for a session of this process.

    Raises:
        ConfigError: the plane is on another host and does not listen, or this process has no valid
            key.
    """
    if descriptor.shared_memory and descriptor.host == this_host():
        return LocalRoute(descriptor, session)
    if not descriptor.controller.control:
        raise ConfigError(
            "The data plane runs on another host (or in another pid namespace) and serves only its own host: set "
            "TransferQueueConfig.listen to an address of that host."
        )
    return RemoteRoute(descriptor, load_key(), session)


def stored(descriptor: PlaneDescriptor) -> PlaneMemory | None:
    """The memory of a plane whose blocks lie in a backend's stores, otherwise None."""
    return None if descriptor.backend in BUILT_IN else BackendMemory(descriptor)


def _close_connection(dialed: asyncio.Future[BulkConnection]) -> None:
    if not dialed.cancelled() and dialed.exception() is None:
        dialed.result().close()
