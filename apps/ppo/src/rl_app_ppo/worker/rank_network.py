"""The network interface through which a process reaches the other ranks of its model."""

from __future__ import annotations

from rl_app_ppo.worker.messages import RankNetwork
from rl_protocol.support.network_interface import NetworkInterface, find_interface, interface_towards
from rl_protocol.support.rendezvous import LOOPBACK_INTERFACE


def rank_interface(network: RankNetwork) -> NetworkInterface:
    """The chosen interface of this host; by default loopback or that of the cluster.

    Raises:
        ConfigError: this host has no such interface, or no route to the cluster.
    """
    if network.interface:
        return find_interface(network.interface)
    return interface_towards(network.peer) if network.peer else LOOPBACK_INTERFACE
