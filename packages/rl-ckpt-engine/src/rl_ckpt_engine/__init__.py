"""Weight synchronisation from trainer to rollout: manifest, engines, registry and manager."""

from rl_ckpt_engine.config import CheckpointEngineConfig
from rl_ckpt_engine.endpoints import (
    AdapterReceiver,
    AdoptingReceiver,
    DirectSender,
    PausableReceiver,
    ReceiverEndpoint,
    SenderEndpoint,
    SleepingReceiver,
)
from rl_ckpt_engine.engine import (
    ENGINE_API_VERSION,
    Capabilities,
    CheckpointEngine,
    CheckpointEngineWithCache,
    DirectEngine,
    GroupEngine,
    SharingEngine,
    TensorSpec,
    Topology,
)
from rl_ckpt_engine.handles import (
    CachingHandle,
    GroupHandle,
    GroupSenderHandle,
    Memory,
    ReceiveAck,
    ReceiverHandle,
    SenderHandle,
    SleepingHandle,
)
from rl_ckpt_engine.manager import CheckpointEngineManager
from rl_ckpt_engine.manifest import Manifest, TensorEntry, WeightKind, plan
from rl_ckpt_engine.plugins import PluginPolicy, load_policy
from rl_ckpt_engine.progress import ProgressBar, SyncProgress
from rl_ckpt_engine.registry import ENTRY_POINT_GROUP, CheckpointEngineRegistry

__version__ = "0.1.0"

__all__ = [
    "ENGINE_API_VERSION",
    "ENTRY_POINT_GROUP",
    "AdapterReceiver",
    "AdoptingReceiver",
    "CachingHandle",
    "Capabilities",
    "CheckpointEngine",
    "CheckpointEngineConfig",
    "CheckpointEngineManager",
    "CheckpointEngineRegistry",
    "CheckpointEngineWithCache",
    "DirectEngine",
    "DirectSender",
    "GroupEngine",
    "GroupHandle",
    "GroupSenderHandle",
    "Manifest",
    "Memory",
    "PausableReceiver",
    "PluginPolicy",
    "ProgressBar",
    "ReceiveAck",
    "ReceiverEndpoint",
    "ReceiverHandle",
    "SenderEndpoint",
    "SenderHandle",
    "SharingEngine",
    "SleepingHandle",
    "SleepingReceiver",
    "SyncProgress",
    "TensorEntry",
    "TensorSpec",
    "Topology",
    "WeightKind",
    "load_policy",
    "plan",
]
