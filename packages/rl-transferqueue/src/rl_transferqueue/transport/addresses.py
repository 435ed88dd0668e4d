"""Addresses that a plane listens on: parsing, checks and formatting."""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import NamedTuple

from rl_protocol.errors import ConfigError
from rl_transferqueue.transport.plane_secret import HOW_TO_SET, PlaneKey

_FORMS = "Write host, host:port or [IPv6]:port, such as 127.0.0.1 or 10.0.0.5:5600."


class Address(NamedTuple):
    """Where a plane listens."""

    host: str
    """Numeric."""
    port: int
    """The first of its ports; 0: any free ports."""


def listen_address(listen: str, key: PlaneKey) -> Address:
    """Resolve `host`, `host:port`, an IPv6 address or `[IPv6]:port` to a numeric address.

    Raises:
        ConfigError: it is not the address of a host, means all addresses, or can be reached from
            other hosts and there is no key.
    """
    host, port = _split(listen)
    try:
        found = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        address = ipaddress.ip_address(found)
    except (OSError, UnicodeError, ValueError) as error:
        raise ConfigError(f"TransferQueueConfig.listen={listen!r} is no address: {error}. {_FORMS}") from None
    if address.is_unspecified:
        raise ConfigError(
            f"TransferQueueConfig.listen={listen!r} stands for every address of this host; name the one that clients on other hosts reach it by."
        )
    if not address.is_loopback and not key:
        raise ConfigError(
            f"TransferQueueConfig.listen={listen!r} can be reached from other hosts and needs a key: {HOW_TO_SET}."
        )
    return Address(found, port)


def _split(listen: str) -> tuple[str, int]:
    """Host and port, 0 if there is none; the colons of a bare IPv6 address separate no port."""
    bracketed = re.fullmatch(r"\[(.*)\](?::(.*))?", listen)
    if bracketed:
        host, port = bracketed[1], bracketed[2]
    elif listen.count(":") == 1:
        host, port = listen.split(":")
    else:
        host, port = listen, None
    if port is None:
        return host, 0
    if not (port.isascii() and port.isdecimal() and 1 <= int(port) <= 65535):
        raise ConfigError(f"TransferQueueConfig.listen={listen!r} must have a port in 1..65535; got {port!r}. {_FORMS}")
    return host, int(port)


def check_ports(listen: str, address: Address, count: int) -> None:
    """Check that this host has the address, and that the ports from its port on are free.

    Raises:
        ConfigError: it has not, or a port is in use.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    ports = range(address.port, address.port + count) if address.port else range(1)
    if ports[-1] > 65535:
        raise ConfigError(
            f"TransferQueueConfig.listen={listen!r} begins {count} ports, two of the controller and one of each storage unit; set a port of at "
            f"most {65536 - count}."
        )
    for port in ports:
        try:
            socket.create_server((address.host, port), family=family).close()
        except OSError as error:
            what = f"port {port} can't be used" if port else "the address is not one of this host"
            raise ConfigError(
                f"TransferQueueConfig.listen={listen!r}: {what}: {error.strerror}. Set another address, or another port, or no port for free ones."
            ) from None


class Endpoints(NamedTuple):
    """Endpoints of a server process for clients of other hosts."""

    control: str = ""
    """ZeroMQ endpoint; empty: none."""
    bulk: str = ""
    """host:port."""


def endpoint(host: str, port: int | str) -> str:
    """Format host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_endpoint(text: str) -> tuple[str, int]:
    """The inverse of `endpoint`."""
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)
