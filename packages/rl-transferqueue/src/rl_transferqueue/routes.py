"""How a client gets to a plane: through this host's memory and sockets, or over the network."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TypeAlias

from rl_protocol.errors import ConfigError
from rl_protocol.hosts import this_host
from rl_transferqueue import threads
from rl_transferqueue.backends import BUILT_IN
from rl_transferqueue.bulk_client import BulkConnection, dial
from rl_transferqueue.descriptor import ControllerAddress, PlaneDescriptor, UnitAddress
from rl_transferqueue.keys import PlaneKey, load_key
from rl_transferqueue.links import Link, connect_unix
from rl_transferqueue.liveness import open_pidfd
from rl_transferqueue.memory import LocalMemory, PlaneMemory
from rl_transferqueue.remote import RemoteMemory
from rl_transferqueue.stored import StoredMemory
from rl_transferqueue.zmq_link import ZmqLink

Server: TypeAlias = ControllerAddress | UnitAddress


@dataclass(frozen=True, slots=True)
class LocalRoute:
    """To a plane of this host."""

    descriptor: PlaneDescriptor
    session: bytes
    here = True
    or_else = ""

    def connect(self) -> Link:
        """A connection to the controller for control messages.

        Raises:
            PlaneLostError: it does not run.
        """
        return connect_unix(self.descriptor.controller.address, self.session, "controller")

    async def lifeline(self, server: Server, name: str, timeout_s: float) -> int:
        """A file descriptor that becomes readable when the process has ended; the caller closes it.

        Raises:
            PlaneLostError: it has ended already.
        """
        del timeout_s
        if self.descriptor.backend == "memory":
            return threads.lifeline(self.descriptor.plane)
        return open_pidfd(server.process, f"The {name} of the data plane")

    def memory(self) -> PlaneMemory:
        """The memory of the units."""
        return stored(self.descriptor) or LocalMemory(self.descriptor.units)


@dataclass(frozen=True, slots=True)
class RemoteRoute:
    """To a plane of another host: control messages, encrypted if there is a key, and bulk connections, some of which are lifelines."""

    descriptor: PlaneDescriptor
    key: PlaneKey
    session: bytes
    here = False
    or_else = " or can't be reached any more"

    def connect(self) -> Link:
        """See LocalRoute; that nobody is there shows later."""
        return ZmqLink(self.descriptor.controller.control, self.session, self.key)

    async def lifeline(self, server: Server, name: str, timeout_s: float) -> int:
        """See LocalRoute.

        Raises:
            PlaneLostError, PlaneTimeout, ConfigError: see `dial`.
        """
        dialling = asyncio.get_running_loop().run_in_executor(
            None, dial, server, self.descriptor.host, name, self.key, self.session, timeout_s
        )
        try:
            return (await asyncio.shield(dialling)).lifeline()
        except asyncio.CancelledError:
            dialling.add_done_callback(_hang_up)
            raise

    def memory(self) -> PlaneMemory:
        """See LocalRoute."""
        return stored(self.descriptor) or RemoteMemory(
            self.descriptor.host, self.descriptor.units, self.key, self.session
        )


def route(descriptor: PlaneDescriptor, session: bytes) -> LocalRoute | RemoteRoute:
    """The way for a session of this process.

    Raises:
        ConfigError: the plane is on another host and does not listen there, or this process has no valid key.
    """
    if descriptor.shared_memory and descriptor.host == this_host():
        return LocalRoute(descriptor, session)
    if not descriptor.controller.control:
        raise ConfigError(
            "The data plane runs on another host (or in another pid namespace) and serves only its own: set transfer_queue.listen to an "
            "address of that host."
        )
    return RemoteRoute(descriptor, load_key(), session)


def stored(descriptor: PlaneDescriptor) -> PlaneMemory | None:
    """The memory of a plane whose blocks lie in a backend's stores: None if they do not."""
    return None if descriptor.backend in BUILT_IN else StoredMemory(descriptor)


def _hang_up(dialled: asyncio.Future[BulkConnection]) -> None:
    if not dialled.cancelled() and dialled.exception() is None:
        dialled.result().close()
