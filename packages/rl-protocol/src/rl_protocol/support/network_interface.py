"""The network interfaces of this host: their names, addresses, and the one that a setting names."""

from __future__ import annotations

import fcntl
import socket
import struct
from functools import cache
from ipaddress import IPv4Address, IPv4Interface
from typing import NamedTuple

from rl_protocol.errors import ConfigError
from rl_protocol.support.host.portable import uses_linux
from rl_protocol.support.host_identity import boot_and_namespace, this_host

LOOPBACK = "127.0.0.1"
_GET_ADDRESS, _GET_MASK = 0x8915, 0x891B  # SIOCGIFADDR and SIOCGIFNETMASK of linux/sockios.h
_NAME_BYTES = 15
"""Longest name of an interface."""


class NetworkInterface(NamedTuple):
    """An interface of this host."""

    name: str
    address: str
    """IPv4, at which other processes reach this one."""

    @property
    def name_for_nccl(self) -> str:
        """The value of NCCL_SOCKET_IFNAME, which takes a name without = as a prefix."""
        return f"={self.name}"


@cache
def this_network() -> str:
    """A name that two processes share exactly if they reach each other through loopback."""
    return boot_and_namespace("net") if uses_linux() else this_host()


def find_interface(setting: str) -> NetworkInterface:
    """The interface that a setting names.

    Args:
        setting: name of an interface, or an IPv4 address of this host.

    Raises:
        ConfigError: this host has neither such an interface with an IPv4 address nor such an
            address; has the interfaces of this host.
    """
    found = interfaces()
    if setting in found:
        return NetworkInterface(setting, str(found[setting].ip))
    try:
        address = IPv4Address(setting)
    except ValueError:
        address = None
    if address is not None and _is_local(str(address)):
        for name, interface in found.items():
            if address in interface.network:
                return NetworkInterface(name, str(address))
    shown = ", ".join(f"{name} ({interface.ip})" for name, interface in found.items()) or "none"
    raise ConfigError(
        f"find_interface.setting must be the name or the IPv4 address of a network interface; got {setting!r}, and host "
        f"{socket.gethostname()} has {shown}."
    )


def interface_towards(peer: str) -> NetworkInterface:
    """The interface from which this host sends to an address; sends nothing.

    Args:
        peer: name or IPv4 address of a host.

    Raises:
        ConfigError: there is no route to it.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((peer, 1))
            address = str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"Host {socket.gethostname()} has no route to {peer} ({error}); set find_interface.setting to the interface between the hosts."
        ) from error
    return find_interface(address)


def interfaces() -> dict[str, IPv4Interface]:
    """The interfaces of this host that have an IPv4 address, by name."""
    return _ask_linux() if uses_linux() else _ask_psutil()


def _ask_psutil() -> dict[str, IPv4Interface]:
    import psutil  # elsewhere than on Linux a dependency

    found: dict[str, IPv4Interface] = {}
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            if one.family is socket.AF_INET:
                found.setdefault(name, IPv4Interface(f"{one.address}/{one.netmask}"))
    return found


def _ask_linux() -> dict[str, IPv4Interface]:
    found: dict[str, IPv4Interface] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for _, name in socket.if_nameindex():
            try:
                address, mask = (_ask(control, name, what) for what in (_GET_ADDRESS, _GET_MASK))
            except OSError:  # it has no IPv4 address
                continue
            found[name] = IPv4Interface(f"{address}/{mask}")
    return found


def _ask(control: socket.socket, name: str, what: int) -> str:
    """An IPv4 address or mask of an interface, as the kernel answers it."""
    request = struct.pack("256s", name.encode()[:_NAME_BYTES])
    return socket.inet_ntoa(fcntl.ioctl(control, what, request)[20:24])


def _is_local(address: str) -> bool:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
