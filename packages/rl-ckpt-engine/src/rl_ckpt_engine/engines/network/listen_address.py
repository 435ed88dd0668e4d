"""The address at which an engine of several hosts listens, and whether other hosts may reach it."""

from __future__ import annotations

import ipaddress
import os

from rl_protocol.errors import ConfigError

TRUSTED = "RL_CKPT_TRUSTED_NETWORK"
"""Environment variable; 1 means that only processes of the run can reach this host."""


def network_is_trusted() -> bool:
    """Whether the operator declares that only processes of the run can reach this host."""
    return os.environ.get(TRUSTED) == "1"


def listen_address(listen: str, *, allowed: bool, need: str) -> str:
    """Check CheckpointEngineConfig.listen and return it.

    Args:
        listen: the setting.
        allowed: other hosts may connect.
        need: what is missing where they may not, for the message.

    Raises:
        ConfigError: it is no address of one interface, or beyond loopback and not allowed.
    """
    try:
        address = ipaddress.ip_address(listen)
    except ValueError:
        raise ConfigError(
            f"CheckpointEngineConfig.listen must be an IP address of this host; got {listen!r}."
        ) from None
    if address.is_unspecified:
        raise ConfigError(
            f"CheckpointEngineConfig.listen must name one address that receivers can reach; got {listen!r}."
        )
    if not address.is_loopback and not allowed:
        raise ConfigError(f"CheckpointEngineConfig.listen={listen} accepts other hosts, which needs {need}.")
    return listen
