"""Messages between driver and worker processes: building and warm-up."""

from __future__ import annotations

import msgspec

from rl_ckpt_engine import PluginPolicy


class BuildCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Load the models and connect to the data plane."""

    config: str
    """The resolved configuration, YAML."""
    model_path: str
    plane: bytes
    """PlaneDescriptor, JSON."""
    rank: int = 0
    """Rank among the processes that share the model."""
    store: str = ""
    """File through which these processes find each other."""
    samples: str = ""
    """Folder of the samples of generated responses and their scores; empty: write none."""
    plugins: PluginPolicy = PluginPolicy()
    """Which plug-ins of the weight synchronization may load, as the driver has read it."""


class WarmupProgress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Progress of the demo model's warm-up; the last one has the path."""

    step: int = 0
    total: int = 0
    loss: float = 0.0
    path: str = ""
