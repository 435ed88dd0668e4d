"""How a client gets to each server process of a plane: through this host's memory and sockets, or over the network."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TypeAlias

from rl_protocol.errors import ConfigError
from rl_transferqueue.buffers import WarmBuffers
from rl_transferqueue.bulk_client import BulkConnection, RemoteMemory, dial
from rl_transferqueue.descriptor import PlaneDescriptor, ProcessAddress, UnitAddress
from rl_transferqueue.hosts import this_host
from rl_transferqueue.keys import PlaneKey, load_key
from rl_transferqueue.liveness import open_pidfd
from rl_transferqueue.memory import LocalMemory, UnitMemory


@dataclass(frozen=True, slots=True)
class LocalRoute:
    """To a process of this host."""

    name: str
    server: ProcessAddress
    key: None = None

    @property
    def address(self) -> str:
        """ZeroMQ endpoint."""
        return self.server.address

    @property
    def lost(self) -> str:
        """What is to be said when its lifeline ends."""
        return f"The {self.name} of the data plane (pid {self.server.process.pid}) has ended; its data is lost."

    async def lifeline(self, timeout_s: float) -> int:
        """A file descriptor that becomes readable when the process has ended; the caller closes it.

        Raises:
            PlaneLostError: it has ended already.
        """
        del timeout_s
        return open_pidfd(self.server.process, f"The {self.name} of the data plane")

    def memory(self) -> UnitMemory:
        """The memory of a unit."""
        assert isinstance(self.server, UnitAddress)
        return LocalMemory(self.server)


@dataclass(frozen=True, slots=True)
class RemoteRoute:
    """To a process of another host: encrypted control messages if there is a key, bulk connections, one of which is the lifeline."""

    name: str
    server: ProcessAddress
    key: PlaneKey
    session: bytes
    buffers: WarmBuffers

    @property
    def address(self) -> str:
        """See LocalRoute."""
        return self.server.control

    @property
    def lost(self) -> str:
        """See LocalRoute."""
        return f"The {self.name} of the data plane at {self.server.bulk} has ended or can't be reached any more; its data is lost."

    async def lifeline(self, timeout_s: float) -> int:
        """See LocalRoute.

        Raises:
            PlaneLostError, PlaneTimeout, ConfigError: see `dial`.
        """
        dialling = asyncio.get_running_loop().run_in_executor(
            None, dial, self.server, self.name, self.key, self.session, timeout_s
        )
        try:
            return (await asyncio.shield(dialling)).lifeline()
        except asyncio.CancelledError:
            dialling.add_done_callback(_hang_up)
            raise

    def memory(self) -> UnitMemory:
        """See LocalRoute."""
        return RemoteMemory(self.server, self.name, self.key, self.session, self.buffers)


Route: TypeAlias = LocalRoute | RemoteRoute


def routes(descriptor: PlaneDescriptor, session: bytes) -> list[Route]:
    """To the controller, then to each unit.

    Raises:
        ConfigError: the plane is on another host and does not listen there, or this process has no valid key.
    """
    named: list[tuple[str, ProcessAddress]] = [("controller", descriptor.controller)]
    named += [(f"storage unit {i}", unit) for i, unit in enumerate(descriptor.units)]
    buffers = WarmBuffers()
    found: list[Route] = []
    for name, server in named:
        if descriptor.shared_memory and server.host == this_host():
            found.append(LocalRoute(name, server))
        elif server.control and server.bulk:
            found.append(RemoteRoute(name, server, load_key(), session, buffers))
        else:
            raise ConfigError(
                f"The {name} of the data plane runs on another host (or in another pid namespace) and serves only its own: set "
                "transfer_queue.listen to an address of that host."
            )
    return found


def _hang_up(dialled: asyncio.Future[BulkConnection]) -> None:
    if not dialled.cancelled() and dialled.exception() is None:
        dialled.result().close()
