"""Engine `nixl`: remote reads through NIXL and its backend UCX.

UCX has no authentication: any process that reaches the sender can read and write registered memory.
So the engine restricts UCX to the loopback interface unless the operator sets UCX_NET_DEVICES to
interfaces of networks that only the run uses. See remote_read for the protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import Generator
from importlib import import_module
from inspect import isclass
from typing import Any, ClassVar

from rl_ckpt_engine.config import CheckpointEngineConfig
from rl_ckpt_engine.engines.base.memfd import address_of
from rl_ckpt_engine.engines.base.publishing_engine import PublishingEngine
from rl_ckpt_engine.engines.contract import Capabilities
from rl_ckpt_engine.engines.network.remote_read import Bytes, ReadsRemotely, RegisteredSlot, RemoteReads
from rl_ckpt_engine.payload.block_stream import Deadline
from rl_ckpt_engine.payload.manifest import DIGEST_BYTES
from rl_protocol.errors import ConfigError, WeightSyncError

DEVICES = "UCX_NET_DEVICES"
"""Environment variable with the interfaces that UCX uses; read when an agent is created."""
_PACKAGES = ("nixl_cu12", "nixl_cu13")
"""Both work without a GPU."""
_POLL_S = 0.0005


class NixlAgent:
    """Implements Agent with NIXL and UCX.

    Raises:
        ConfigError: NIXL is not installed, or can't be loaded.
        WeightSyncError: UCX can't be used.
    """

    def __init__(self) -> None:
        api, self._errors = _load()
        self._memory: list[Bytes] = []
        self._peer: tuple[bytes, str] | None = None
        with self._named("Starting NIXL"), _devices():
            self._nixl: Any = api.nixl_agent(
                f"rl-ckpt-{secrets.token_hex(DIGEST_BYTES)}", api.nixl_agent_config(backends=["UCX"])
            )

    def register(self, memory: Bytes) -> None:
        if memory.nbytes and not any(memory is known for known in self._memory):
            with self._named("Registering memory"):
                self._nixl.register_memory([(address_of(memory), memory.nbytes, 0, "")], mem_type="DRAM")
            self._memory.append(memory)

    @property
    def metadata(self) -> bytes:
        with self._named("Describing memory"):
            return bytes(self._nixl.get_agent_metadata())

    def reach(self, metadata: bytes) -> str:
        if self._peer is None or self._peer[0] != metadata:
            with self._named("Reaching the sender"):
                name = self._nixl.add_remote_agent(metadata)
            self._peer = metadata, name if isinstance(name, str) else bytes(name).decode()
        return self._peer[1]

    def read(self, peer: str, address: int, into: Bytes) -> Any:
        with self._named("Reading"):
            here = self._nixl.get_xfer_descs([(address_of(into), into.nbytes, 0)], mem_type="DRAM")
            there = self._nixl.get_xfer_descs([(address, into.nbytes, 0)], mem_type="DRAM")
            transfer = self._nixl.initialize_xfer("READ", here, there, peer)
            self._nixl.transfer(transfer)
            return transfer

    async def done(self, transfer: Any, deadline: Deadline) -> None:
        with self._named("Reading"):
            while (state := self._nixl.check_xfer_state(transfer)) == "PROC":
                deadline.check()
                await asyncio.sleep(_POLL_S)
            self._nixl.release_xfer_handle(transfer)
        if state != "DONE":
            raise WeightSyncError(
                f"NIXL reports {state} for a transfer: the sender died or closed. A new sync is needed."
            )

    def cancel(self, transfer: Any) -> bool:
        try:
            self._nixl.release_xfer_handle(transfer)
        except self._errors:
            return False
        return True

    def close(self) -> None:
        self._nixl = None
        self._memory.clear()

    @contextlib.contextmanager
    def _named(self, what: str) -> Generator[None]:
        try:
            yield
        except self._errors as error:
            raise WeightSyncError(
                f"{what} failed: {type(error).__name__}: {error}. Has the sender died or closed? A new sync is needed."
            ) from error


class NixlEngine(ReadsRemotely[Any], PublishingEngine[RegisteredSlot[Any]]):
    """Remote reads through NIXL.

    Raises:
        ConfigError: NIXL is not installed, or can't be loaded.
    """

    API_VERSION: ClassVar[int] = 1
    name: ClassVar[str] = "nixl"
    capabilities: ClassVar[Capabilities] = Capabilities(
        same_host_only=True, zero_copy=False, elastic=True, devices=("cpu",), caches=True
    )

    def __init__(self, config: CheckpointEngineConfig | None = None) -> None:
        super().__init__(config)
        _load()
        self._reads = RemoteReads(self.name, NixlAgent, self._buffers.current)


def _load() -> tuple[Any, tuple[type[Exception], ...]]:
    """NIXL's Python API and its errors."""
    reasons: list[str] = []
    for package in _PACKAGES:
        try:
            api, bindings = import_module(f"{package}._api"), import_module(f"{package}._bindings")
        except ImportError as error:
            reasons.append(str(error))
            continue
        if "NIXL_LOG_LEVEL" not in os.environ:
            logging.getLogger("nixl").setLevel(logging.WARNING)  # it logs every agent to standard output
        errors = tuple(kind for kind in vars(bindings).values() if isclass(kind) and issubclass(kind, Exception))
        return api, errors
    raise ConfigError(
        f"Engine 'nixl' can't be loaded: {'; '.join(reasons)}. Install rl-ckpt-engine[nixl], or nixl-cu13 for CUDA 13."
    )


@contextlib.contextmanager
def _devices() -> Generator[None]:
    """Restrict UCX to loopback unless the operator has set interfaces."""
    if DEVICES in os.environ:
        yield
        return
    os.environ[DEVICES] = "lo"
    try:
        yield
    finally:
        del os.environ[DEVICES]
