"""The network interface through which a process reaches others, such as the ranks of its model."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from rl_ckpt_engine import CheckpointEngineConfig
from rl_protocol.support.network_interface import LOOPBACK, NetworkInterface, find_interface, interface_towards
from rl_protocol.support.rendezvous import LOOPBACK_INTERFACE


class RankNetwork(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Through which network processes reach each other."""

    interface: str = ""
    """trainer.network_interface; empty: the one that reaches `peer`."""
    peer: str = ""
    """Name or address of a host of the cluster; empty: they share loopback."""


def rank_interface(network: RankNetwork) -> NetworkInterface:
    """The chosen interface of this host; by default loopback or that of the cluster.

    Raises:
        ConfigError: this host has no such interface, or no route to the cluster.
    """
    if network.interface:
        return find_interface(network.interface)
    return interface_towards(network.peer) if network.peer else LOOPBACK_INTERFACE


def listening_in(network: RankNetwork, settings: CheckpointEngineConfig) -> CheckpointEngineConfig:
    """The settings of a weight engine that listens at this host's address in a network, unless
    checkpoint_engine.listen is another one than loopback.

    Raises:
        ConfigError: as `rank_interface`.
    """
    return settings if settings.listen != LOOPBACK else replace(settings, listen=rank_interface(network).address)
