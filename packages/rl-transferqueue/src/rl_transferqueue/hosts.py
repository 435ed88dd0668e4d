"""On which addresses a plane may listen, and how they are written."""

from __future__ import annotations

import ipaddress
import socket
from typing import NamedTuple

from rl_protocol.errors import ConfigError
from rl_transferqueue.keys import HOW_TO_SET, PlaneKey


def listen_address(listen: str, key: PlaneKey) -> str:
    """The numeric address to listen on and to tell to clients.

    Raises:
        ConfigError: it is no address of a host, stands for all addresses, or other hosts can reach it and there is no key.
    """
    try:
        found = str(socket.getaddrinfo(listen, None, type=socket.SOCK_STREAM)[0][4][0])
        address = ipaddress.ip_address(found)
    except (OSError, UnicodeError, ValueError) as error:
        raise ConfigError(f"transfer_queue.listen={listen!r} is no address: {error}.") from None
    if address.is_unspecified:
        raise ConfigError(
            f"transfer_queue.listen={listen!r} stands for every address of this host; name the one that clients on other hosts reach it by."
        )
    if not address.is_loopback and not key:
        raise ConfigError(
            f"transfer_queue.listen={listen!r} can be reached from other hosts and needs a key: {HOW_TO_SET}."
        )
    return found


class Endpoints(NamedTuple):
    """Where a server process serves clients of other hosts."""

    control: str = ""
    """ZeroMQ endpoint; empty: nowhere."""
    bulk: str = ""
    """host:port."""


def endpoint(host: str, port: int | str) -> str:
    """host:port, as ZeroMQ and we write it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_endpoint(text: str) -> tuple[str, int]:
    """The inverse of `endpoint`."""
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)
