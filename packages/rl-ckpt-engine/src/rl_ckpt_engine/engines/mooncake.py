"""Engine `mooncake`: receivers read the sender's memory (see reading) through Mooncake's transfer engine, over TCP or RDMA.

Mooncake asks nobody for a key and listens at all addresses of the host, also when it is given one: whoever reaches the host can read and write what
is registered. So the engine starts only where the operator has said, in the environment and not in the settings of a run, that the network is the
run's own.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any, ClassVar

from rl_ckpt_engine.config import CheckpointEngineConfig
from rl_ckpt_engine.engine import Capabilities
from rl_ckpt_engine.engines.reading import Bytes, ReadingEngine, address_of
from rl_ckpt_engine.stream import Deadline
from rl_protocol.errors import ConfigError, WeightSyncError

TRUSTED = "RL_CKPT_TRUSTED_NETWORK"
"""Environment variable: 1: nobody but the run reaches this host, at any of its addresses."""
PROTOCOL = "RL_CKPT_MOONCAKE_PROTOCOL"
"""Environment variable: tcp (default) or rdma."""
_POLL_S = 0.0005
_RUNNING, _DONE = 0, 1


class Transfer:
    """A read that is under way: Mooncake is asked for it in a thread, since reaching the peer may block, and asked how it is until it is over.
    After that its number must not be used."""

    def __init__(self, asked: asyncio.Future[int]) -> None:
        self.asked = asked
        self.state = _RUNNING


class MooncakeAgent:
    """Mooncake's transfer engine, without a metadata server; see Agent.

    Args:
        host: address at which other members reach this one.

    Raises:
        ConfigError: Mooncake is not installed, or does not load.
        WeightSyncError: it does not start.
    """

    def __init__(self, host: str) -> None:
        self._mooncake: Any = _load()()
        self._memory: list[Bytes] = []
        self._host = host
        protocol = os.environ.get(PROTOCOL, "tcp")
        self._check("start", self._mooncake.initialize(host, "P2PHANDSHAKE", protocol, ""))

    def register(self, memory: Bytes) -> None:
        """See Agent.register."""
        if memory.nbytes and not any(memory is known for known in self._memory):
            self._check("register memory", self._mooncake.register_memory(address_of(memory), memory.nbytes))
            self._memory.append(memory)

    @property
    def metadata(self) -> bytes:
        """See Agent.metadata."""
        return f"{self._host}:{self._mooncake.get_rpc_port()}".encode()

    def reach(self, metadata: bytes) -> str:
        """See Agent.reach; the peer is reached with the first read."""
        return metadata.decode()

    def read(self, peer: str, address: int, into: Bytes) -> Transfer:
        """See Agent.read."""
        begin = self._mooncake.batch_transfer_async_read
        asked = asyncio.to_thread(begin, peer, [address_of(into)], [address], [into.nbytes])
        return Transfer(asyncio.ensure_future(asked))

    async def done(self, transfer: Transfer, deadline: Deadline) -> None:
        """See Agent.done."""
        while self._state(transfer) == _RUNNING:
            deadline.check()
            await asyncio.sleep(_POLL_S)
        if transfer.state != _DONE:
            raise WeightSyncError(
                f"Mooncake reports {transfer.state} for a transfer: the sender died or closed. A new sync is needed."
            )

    def cancel(self, transfer: Transfer) -> bool:
        """See Agent.cancel."""
        return self._state(transfer) != _RUNNING

    def close(self) -> None:
        """See Agent.close."""
        self._mooncake = None
        self._memory.clear()

    def _state(self, transfer: Transfer) -> int:
        if transfer.state == _RUNNING and transfer.asked.done():
            number = transfer.asked.result()
            transfer.state = self._mooncake.transfer_check_status(number) if number else -1  # 0: the peer is not there
        return transfer.state

    def _check(self, what: str, code: int) -> None:
        if code:
            raise WeightSyncError(
                f"Mooncake could not {what}: {code}; its log on standard error says why. Set checkpoint_engine.listen to an address of this host, "
                f"and {PROTOCOL} to what its devices can do."
            )


class MooncakeEngine(ReadingEngine[Transfer]):
    """See the modules' docstrings.

    Args:
        config: settings; `listen` is the address at which other members reach this one.

    Raises:
        ConfigError: Mooncake is not installed or does not load, or the operator has not said that the network can be trusted.
    """

    API_VERSION: ClassVar[int] = 1
    name: ClassVar[str] = "mooncake"
    capabilities: ClassVar[Capabilities] = Capabilities(
        same_host_only=False, zero_copy=False, elastic=True, devices=("cpu",)
    )

    def __init__(self, config: CheckpointEngineConfig | None = None) -> None:
        super().__init__(config)
        _load()
        if os.environ.get(TRUSTED) != "1":
            raise ConfigError(
                "Engine 'mooncake' listens at all addresses of this host and asks nobody for a key: whoever reaches it can read and write the "
                f"weights. Set the environment variable {TRUSTED}=1 where nobody but the run does, or checkpoint_engine.backend to tcp, which has "
                "keys."
            )

    def _new_agent(self) -> MooncakeAgent:
        return MooncakeAgent(self._config.listen)


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
