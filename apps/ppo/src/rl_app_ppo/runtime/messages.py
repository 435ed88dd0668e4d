"""Messages between the driver and the worker processes that are about processes, not about training."""

from __future__ import annotations

from typing import Literal

import msgspec

from rl_ckpt_engine import Memory, PluginPolicy

Role = Literal["rollout", "reward", "actor", "ref", "critic"]


class BuildCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Load the models and connect to the data plane."""

    config: str
    """The resolved configuration, YAML."""
    model_path: str
    plane: bytes
    """PlaneDescriptor, JSON."""
    rank: int = 0
    """Among the processes that share the model."""
    store: str = ""
    """File through which these find each other."""
    samples: str = ""
    """Folder for what was written in validation and how it was judged."""
    plugins: PluginPolicy = PluginPolicy()
    """Which plug-ins of the weight synchronisation may load, as the driver read it."""


class WeightCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One call of the weight synchronisation; which fields matter depends on the method."""

    version: int = 0
    manifest: bytes = b""
    member: bytes = b""
    """Part of the topology of a group, for its member."""
    level: int = 1
    """Of sleep."""
    part: Memory | None = None
    """Of the memory that is had again; None: all of it."""
    timeout_s: float = 60.0


class WeightsSent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Answer to `weights.send`."""

    manifest: bytes
    metrics: dict[str, float]
    """What the sender measured, by name."""


class WarmupProgress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far the warm-up of the demo model is; the last one carries the path."""

    step: int = 0
    total: int = 0
    loss: float = 0.0
    path: str = ""
