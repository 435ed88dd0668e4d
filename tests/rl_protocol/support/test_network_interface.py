"""Network interfaces: found by name, by address and by route; others are refused by name."""

from __future__ import annotations

import socket

import pytest

from rl_protocol import ConfigError
from rl_protocol.support.network_interface import NetworkInterface, find_interface, interface_towards, interfaces
from rl_protocol.support.rendezvous import Rendezvous, RendezvousListener


def test_loopback_is_found_by_name_by_address_and_by_route():
    loopback = NetworkInterface("lo", "127.0.0.1")
    assert find_interface("lo") == find_interface("127.0.0.1") == interface_towards("localhost") == loopback
    assert find_interface("127.0.0.2") == NetworkInterface("lo", "127.0.0.2")


def test_every_interface_is_found_by_its_address():
    for name, interface in interfaces().items():
        assert find_interface(str(interface.ip)) == find_interface(name) == (name, str(interface.ip))


@pytest.mark.parametrize("setting", ["eth77", "lo:9", "192.0.2.200", "::1", "0.0.0.0", "lo0" * 200, "127.0.0"])
def test_what_this_host_has_not_is_refused_with_what_it_has(setting):
    with pytest.raises(
        ConfigError, match=rf"find_interface\.setting .* got '{setting}', and host .* has .*lo \(127\.0\.0\.1\)"
    ):
        find_interface(setting)


def test_a_listener_takes_connections_at_the_address_of_its_interface_alone():
    """On Linux, 127.0.0.2 is another address of the loopback interface."""
    listener = RendezvousListener(find_interface("127.0.0.2"))
    try:
        assert listener.address.host == "127.0.0.2"
        socket.create_connection(("127.0.0.2", listener.address.port), timeout=5).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", listener.address.port), timeout=5)
    finally:
        listener.close()


def test_gloo_and_nccl_are_given_the_interface_by_its_exact_name():
    meeting = Rendezvous(interface=NetworkInterface("eth1", "10.0.0.5"))
    assert meeting.socket_settings == {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}
