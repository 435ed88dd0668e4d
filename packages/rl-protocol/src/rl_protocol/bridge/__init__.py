"""Worker methods declare the columns they read and write, and a data plane moves them."""

from rl_protocol.bridge.column_flow import check_flow
from rl_protocol.bridge.declaration import Declaration, Fetched, Output, declaration
from rl_protocol.bridge.decorator import fetch, tqbridge
from rl_protocol.bridge.replicas import ReplicaOfRanks, Replicas

__all__ = [
    "Declaration",
    "Fetched",
    "Output",
    "ReplicaOfRanks",
    "Replicas",
    "check_flow",
    "declaration",
    "fetch",
    "tqbridge",
]
