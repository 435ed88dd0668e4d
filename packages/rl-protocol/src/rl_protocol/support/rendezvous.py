"""Where the ranks of a model meet: an address of the host of rank 0. Imports no torch."""

from __future__ import annotations

import secrets
import socket
from dataclasses import dataclass

import msgspec

from rl_protocol.support.network_interface import LOOPBACK, NetworkInterface

LOOPBACK_INTERFACE = NetworkInterface("lo", LOOPBACK)


class RendezvousAddress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where rank 0 listens for the other ranks."""

    host: str
    """IPv4."""
    port: int
    key: str
    """Random prefix of all keys of the store: a process that does not know it changes none. The
    store and gloo do not authenticate their peers."""


class RendezvousListener:
    """The listening socket of rank 0, which binds only the address of one interface.

    Attributes:
        address: where it listens.
    """

    def __init__(self, interface: NetworkInterface = LOOPBACK_INTERFACE) -> None:
        self._socket = socket.create_server((interface.address, 0))
        self.address = RendezvousAddress(
            host=interface.address, port=int(self._socket.getsockname()[1]), key=secrets.token_hex(16)
        )

    def detach(self) -> int:
        """Pass the file descriptor on to the caller, who closes it."""
        return self._socket.detach()

    def close(self) -> None:
        """Stop listening, unless the socket was passed on; safe to call twice."""
        self._socket.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """How a process joins the ranks of its model.

    Args:
        rank: 0..size-1.
        size: number of ranks; 1: the process meets no others.
        address: where rank 0 listens; None with one rank.
        interface: through which this process reaches the other ranks.
        chosen: the user has chosen the interface, which then overrides the environment variables
            GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME.
        listener: of rank 0; None in the others.
    """

    rank: int = 0
    size: int = 1
    address: RendezvousAddress | None = None
    interface: NetworkInterface = LOOPBACK_INTERFACE
    chosen: bool = False
    listener: RendezvousListener | None = None

    @property
    def socket_settings(self) -> dict[str, str]:
        """The environment variables by which gloo and NCCL find the interface."""
        return {"GLOO_SOCKET_IFNAME": self.interface.name, "NCCL_SOCKET_IFNAME": self.interface.name_for_nccl}
