"""The data plane: a controller that knows where rows are, storage units with shared-memory arenas, and a client with zero-copy reads."""

from rl_transferqueue.blocking import BlockingPlane, Portal, connect_blocking, portal
from rl_transferqueue.client import Client, connect
from rl_transferqueue.config import TransferQueueConfig
from rl_transferqueue.descriptor import PlaneDescriptor
from rl_transferqueue.launch import LocalPlane, check_plane, start_local_plane

__version__ = "0.1.0"

__all__ = [
    "BlockingPlane",
    "Client",
    "LocalPlane",
    "PlaneDescriptor",
    "Portal",
    "TransferQueueConfig",
    "check_plane",
    "connect",
    "connect_blocking",
    "portal",
    "start_local_plane",
]
