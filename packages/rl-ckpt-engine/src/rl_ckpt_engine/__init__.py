"""Weight synchronization from trainer to rollout: manager, endpoints, engines, registry."""

from rl_ckpt_engine.config import CheckpointEngineConfig
from rl_ckpt_engine.endpoints.operations import remote
from rl_ckpt_engine.endpoints.receiver import ReceiveAck, ReceiverEndpoint, ReceiverHandle
from rl_ckpt_engine.endpoints.sender import DirectSender, FollowerEndpoint, SendAck, SenderEndpoint, SenderHandle
from rl_ckpt_engine.endpoints.unix_socket import connect, serve
from rl_ckpt_engine.endpoints.weight_sinks import (
    AdapterReceiver,
    AdoptingReceiver,
    PausableReceiver,
    SleepingReceiver,
)
from rl_ckpt_engine.engines.contract import (
    ENGINE_API_VERSION,
    Capabilities,
    CheckpointEngine,
    TensorSpec,
    Topology,
)
from rl_ckpt_engine.payload.manifest import Manifest, TensorEntry, WeightKind, plan
from rl_ckpt_engine.plugins import PluginPolicy, load_policy
from rl_ckpt_engine.registry import ENTRY_POINT_GROUP, CheckpointEngineRegistry
from rl_ckpt_engine.sync.manager import CheckpointEngineManager
from rl_ckpt_engine.sync.progress import ProgressBar, SyncProgress
from rl_protocol.ports import Memory

__version__ = "0.1.0"

__all__ = [
    "ENGINE_API_VERSION",
    "ENTRY_POINT_GROUP",
    "AdapterReceiver",
    "AdoptingReceiver",
    "Capabilities",
    "CheckpointEngine",
    "CheckpointEngineConfig",
    "CheckpointEngineManager",
    "CheckpointEngineRegistry",
    "DirectSender",
    "FollowerEndpoint",
    "Manifest",
    "Memory",
    "PausableReceiver",
    "PluginPolicy",
    "ProgressBar",
    "ReceiveAck",
    "ReceiverEndpoint",
    "ReceiverHandle",
    "SendAck",
    "SenderEndpoint",
    "SenderHandle",
    "SleepingReceiver",
    "SyncProgress",
    "TensorEntry",
    "TensorSpec",
    "Topology",
    "WeightKind",
    "connect",
    "load_policy",
    "plan",
    "remote",
    "serve",
]
