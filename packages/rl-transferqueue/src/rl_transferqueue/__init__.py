"""The data plane: stores batches of named columns by key and moves them between processes."""

from rl_protocol.bridge import Declaration, Replicas, check_flow, declaration, tqbridge
from rl_transferqueue.client.blocking_client import BlockingPlane, Portal, connect_blocking, portal
from rl_transferqueue.client.client import Client, connect
from rl_transferqueue.client.retries.put_timeout import PutTimeout
from rl_transferqueue.config import TransferQueueConfig
from rl_transferqueue.launch.host_units import HostUnits, start_host_units
from rl_transferqueue.launch.local_plane import LocalPlane, check_plane, start_local_plane
from rl_transferqueue.wire.descriptor import PlaneDescriptor

__version__ = "0.1.0"

__all__ = [
    "BlockingPlane",
    "Client",
    "Declaration",
    "HostUnits",
    "LocalPlane",
    "PlaneDescriptor",
    "Portal",
    "PutTimeout",
    "Replicas",
    "TransferQueueConfig",
    "check_flow",
    "check_plane",
    "connect",
    "connect_blocking",
    "declaration",
    "portal",
    "start_host_units",
    "start_local_plane",
    "tqbridge",
]
