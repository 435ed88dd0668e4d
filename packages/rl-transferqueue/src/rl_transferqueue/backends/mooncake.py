"""Blocks in a Mooncake store, which pools the memory of unit processes over RDMA or TCP."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import numpy as np
from mooncake.store import (  # pyright: ignore[reportMissingImports] - an extra
    MooncakeDistributedStore,
    ReplicateConfig,
)

from rl_protocol.errors import ConfigError, DataPlaneError
from rl_protocol.wire import Buffer
from rl_transferqueue.backends import Share
from rl_transferqueue.memory.receive_pool import ReceivePool

PROTOCOL = "RL_TQ_MOONCAKE_PROTOCOL"
"""Environment variable: tcp (default) or rdma."""
HOST = "RL_TQ_MOONCAKE_HOST"
"""Environment variable: address by which other hosts reach this process; default: by host name."""
_SLACK = 1.25
"""Memory provided per byte that may be used: the store's own bookkeeping and fragments."""
_SCRATCH_BYTES = 16 << 20
_NOT_FOUND = (-704, -706)
"""Codes of a key that is not there, or held for a reader a moment longer."""


class MooncakeStore:
    """Blocks are pinned: the store must never evict blocks that the controller knows."""

    def __init__(self, share: Share, provide: int) -> None:
        if not share.address:
            raise ConfigError(
                "TransferQueueConfig.backend=mooncake needs TransferQueueConfig.backend_address: host:port of mooncake_master."
            )
        self._prefix = share.plane
        self._buffers = ReceivePool()
        self._store = MooncakeDistributedStore()
        host = os.environ.get(HOST) or socket.gethostbyname(socket.gethostname())
        protocol = os.environ.get(PROTOCOL, "tcp")
        code = self._store.setup(host, "P2PHANDSHAKE", provide, _SCRATCH_BYTES, protocol, "", share.address)
        if code:
            raise ConfigError(
                f"Mooncake answered {code} at start with {protocol} from {host}: is mooncake_master at {share.address}, and can it reach "
                f"{host}? Set TransferQueueConfig.backend_address, {HOST} and {PROTOCOL}."
            )

    def put_block(self, key: str, parts: Sequence[Buffer]) -> None:
        nbytes = sum(len(part) for part in parts)
        memory = np.frombuffer(self._buffers.take(nbytes), np.uint8)
        at = 0
        for part in parts:
            memory[at : at + len(part)] = np.frombuffer(part, np.uint8)
            at += len(part)
        config = ReplicateConfig()
        config.replica_num = 1
        config.with_hard_pin = True
        place = memory.ctypes.data
        self._check("register", self._store.register_buffer(place, nbytes))
        try:
            self._check("put", self._store.put_from(self._name(key), place, nbytes, config))
        finally:
            self._store.unregister_buffer(place)

    def get_block(self, key: str, nbytes: int) -> Buffer:
        memory = self._buffers.take(nbytes)
        place = np.frombuffer(memory, np.uint8).ctypes.data
        self._check("register", self._store.register_buffer(place, nbytes))
        try:
            got = self._store.get_into(self._name(key), place, nbytes)
        finally:
            self._store.unregister_buffer(place)
        if got < nbytes:
            raise DataPlaneError(f"Mooncake answered {got} to a get of block {key!r} of {nbytes} bytes.")
        return memory.toreadonly()

    def free(self, keys: Sequence[str]) -> None:
        for key in keys:
            code = self._store.remove(self._name(key), True)
            if code and code not in _NOT_FOUND:
                raise DataPlaneError(f"Mooncake answered {code} to the removal of block {key!r}.")

    def close(self) -> None:
        self._store.close()

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _check(self, what: str, code: int) -> None:
        if code:
            raise DataPlaneError(
                f"Mooncake answered {code} to a {what}; its log says why (-200: no room, raise TransferQueueConfig.capacity_mb)."
            )


class MooncakeBackend:
    """Stores of one Mooncake master."""

    def host(self, share: Share) -> MooncakeStore:
        return MooncakeStore(share, int(share.nbytes * _SLACK))

    def join(self, share: Share) -> MooncakeStore:
        return MooncakeStore(share, 0)
