"""Session: a client of the plane, with the settings of `get_meta`."""

from __future__ import annotations

from dataclasses import dataclass, field

from rl_transferqueue.client.client import Client
from rl_transferqueue.compat.sampler import BaseSampler, SequentialSampler


@dataclass(kw_only=True)
class Settings:
    """How `get_meta` chooses and waits; the same in every process of a plane."""

    sampler: BaseSampler = field(default_factory=SequentialSampler)
    polling_mode: bool = False
    """Return an empty BatchMeta at once instead of waiting for rows."""
    fetch_timeout_s: float = 5.0
    """Seconds to wait for rows."""


@dataclass(frozen=True)
class Session:
    """What the operations of a TransferQueue client work on."""

    plane: Client
    """Operations run on its event loop."""
    settings: Settings
