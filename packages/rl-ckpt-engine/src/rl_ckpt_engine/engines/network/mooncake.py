"""Engine `mooncake`: remote reads through Mooncake's transfer engine, over TCP or RDMA.

Mooncake has no authentication and listens on all addresses of the host: any process that reaches
the host can read and write registered memory. So the engine starts only if the operator declares,
by an environment variable, that the network is trusted. See remote_read for the protocol.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any, ClassVar

from rl_ckpt_engine.config import CheckpointEngineConfig
from rl_ckpt_engine.engines.base.memfd import address_of
from rl_ckpt_engine.engines.base.publishing_engine import PublishingEngine
from rl_ckpt_engine.engines.contract import Capabilities
from rl_ckpt_engine.engines.network.listen_address import TRUSTED, network_is_trusted
from rl_ckpt_engine.engines.network.remote_read import Bytes, ReadsRemotely, RegisteredSlot, RemoteReads
from rl_ckpt_engine.payload.block_stream import Deadline
from rl_protocol.errors import ConfigError, WeightSyncError

PROTOCOL = "RL_CKPT_MOONCAKE_PROTOCOL"
"""Environment variable: tcp (default) or rdma."""
_POLL_S = 0.0005
_RUNNING, _DONE = 0, 1


class Transfer:
    """A running read.

    It is started in a thread, because connecting may block, and polled until it ends. After that
    its number is no longer valid.
    """

    def __init__(self, asked: asyncio.Future[int]) -> None:
        self.asked = asked
        self.state = _RUNNING


class MooncakeAgent:
    """Implements Agent with Mooncake's transfer engine, without a metadata server.

    Args:
        host: address at which other members reach this process.

    Raises:
        ConfigError: Mooncake is not installed, or can't be loaded.
        WeightSyncError: it does not start.
    """

    def __init__(self, host: str) -> None:
        self._mooncake: Any = _load()()
        self._memory: list[Bytes] = []
        self._host = host
        protocol = os.environ.get(PROTOCOL, "tcp")
        self._check("start", self._mooncake.initialize(host, "P2PHANDSHAKE", protocol, ""))

    def register(self, memory: Bytes) -> None:
        if memory.nbytes and not any(memory is known for known in self._memory):
            self._check("register memory", self._mooncake.register_memory(address_of(memory), memory.nbytes))
            self._memory.append(memory)

    @property
    def metadata(self) -> bytes:
        return f"{self._host}:{self._mooncake.get_rpc_port()}".encode()

    def reach(self, metadata: bytes) -> str:
        """Return the peer's name; the connection is made by the first read."""
        return metadata.decode()

    def read(self, peer: str, address: int, into: Bytes) -> Transfer:
        begin = self._mooncake.batch_transfer_async_read
        asked = asyncio.to_thread(begin, peer, [address_of(into)], [address], [into.nbytes])
        return Transfer(asyncio.ensure_future(asked))

    async def done(self, transfer: Transfer, deadline: Deadline) -> None:
        while self._state(transfer) == _RUNNING:
            deadline.check()
            await asyncio.sleep(_POLL_S)
        if transfer.state != _DONE:
            raise WeightSyncError(
                f"Mooncake reports {transfer.state} for a transfer: the sender died or closed. A new sync is needed."
            )

    def cancel(self, transfer: Transfer) -> bool:
        return self._state(transfer) != _RUNNING

    def close(self) -> None:
        self._mooncake = None
        self._memory.clear()

    def _state(self, transfer: Transfer) -> int:
        if transfer.state == _RUNNING and transfer.asked.done():
            number = transfer.asked.result()
            transfer.state = (
                self._mooncake.transfer_check_status(number) if number else -1
            )  # 0: the peer was not reached
        return transfer.state

    def _check(self, what: str, code: int) -> None:
        if code:
            raise WeightSyncError(
                f"Mooncake could not {what}: {code}; see its log on standard error. Set CheckpointEngineConfig.listen to an address of this host, "
                f"and {PROTOCOL} to a protocol that its devices support."
            )


class MooncakeEngine(ReadsRemotely[Transfer], PublishingEngine[RegisteredSlot[Transfer]]):
    """Remote reads through Mooncake.

    Args:
        config: settings; `listen` is the address at which other members reach this process.

    Raises:
        ConfigError: Mooncake is not installed or can't be loaded, or the network is not declared as
            trusted.
    """

    API_VERSION: ClassVar[int] = 1
    name: ClassVar[str] = "mooncake"
    capabilities: ClassVar[Capabilities] = Capabilities(
        same_host_only=False, zero_copy=False, elastic=True, devices=("cpu",), caches=True
    )

    def __init__(self, config: CheckpointEngineConfig | None = None) -> None:
        super().__init__(config)
        _load()
        if not network_is_trusted():
            raise ConfigError(
                "Engine 'mooncake' listens on all addresses of this host without authentication: any process that reaches it can read and write "
                f"the weights. Set the environment variable {TRUSTED}=1 if only the run reaches this host, or set CheckpointEngineConfig.backend to "
                "tcp, which has keys."
            )
        self._reads = RemoteReads(self.name, lambda: MooncakeAgent(self._config.listen), self._buffers.current)


def _load() -> Any:
    """Mooncake's class of transfer engines."""
    try:
        from mooncake.engine import TransferEngine  # pyright: ignore[reportMissingImports] - an extra
    except ImportError as error:
        raise ConfigError(
            f"Engine 'mooncake' can't be loaded: {error}. Install rl-ckpt-engine[mooncake], and on Debian libibverbs1, libnl-3-200 and "
            "libnl-route-3-200."
        ) from error
    return TransferEngine
