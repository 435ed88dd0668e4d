"""The network interface through which a process reaches others, such as the ranks of its model."""

from __future__ import annotations

from dataclasses import replace

from rl_app_ppo.worker.messages import RankNetwork
from rl_ckpt_engine import CheckpointEngineConfig
from rl_protocol.support.network_interface import LOOPBACK, NetworkInterface, find_interface, interface_towards
from rl_protocol.support.rendezvous import LOOPBACK_INTERFACE


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
