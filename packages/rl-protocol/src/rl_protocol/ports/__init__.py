"""Ports: the interfaces that the trainer uses and other packages implement.

Every port that does I/O is async, takes a deadline in seconds on every call, and raises only errors
of `rl_protocol.errors`. Implementations must pass the conformance suites in `rl_protocol.testing`.
"""

from rl_protocol.ports.data_plane import DataPlane, PlaneStats, RowChanges, RowFlags, RowHosts, Traffic
from rl_protocol.ports.metrics import MetricSink
from rl_protocol.ports.replay import GroupFailure, GroupStatus, Lease, ReplayBuffer, SessionResult, settle
from rl_protocol.ports.reward import RewardFunction
from rl_protocol.ports.rollout import Generation, GenerationRequest, ImageInput, RolloutEngine, SamplingParams
from rl_protocol.ports.training import CriticBackend, PolicyBackend
from rl_protocol.ports.weights import (
    Memory,
    RolloutMemory,
    WeightCapabilities,
    WeightReceiver,
    WeightSender,
    WeightSync,
    WeightSyncReport,
)

__all__ = [
    "CriticBackend",
    "DataPlane",
    "Generation",
    "GenerationRequest",
    "GroupFailure",
    "GroupStatus",
    "ImageInput",
    "Lease",
    "Memory",
    "MetricSink",
    "PlaneStats",
    "PolicyBackend",
    "ReplayBuffer",
    "RewardFunction",
    "RolloutEngine",
    "RolloutMemory",
    "RowChanges",
    "RowFlags",
    "RowHosts",
    "SamplingParams",
    "SessionResult",
    "Traffic",
    "WeightCapabilities",
    "WeightReceiver",
    "WeightSender",
    "WeightSync",
    "WeightSyncReport",
    "settle",
]
