"""Engine `nixl`: receivers read the weights, bucket by bucket, out of the sender's memory through NIXL and its backend UCX.

The sender copies the weights once into memory of its own (see memfd) and registers it; nobody in its process takes part in a read but UCX's
progress thread. The next bucket is under way while the receiver verifies the last one. A header in front of the payload, read first, tells
whether the version is still there.

UCX authenticates nobody: whoever reaches the sender can read and write what it has registered. So the engine keeps UCX on the loopback interface
unless the operator names others in UCX_NET_DEVICES, on networks that belong to the run alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import AsyncGenerator, Generator, Sequence
from importlib import import_module
from inspect import isclass
from typing import Any, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from rl_ckpt_engine.config import CheckpointEngineConfig
from rl_ckpt_engine.engine import Capabilities
from rl_ckpt_engine.engines.copying import CopyingEngine
from rl_ckpt_engine.engines.memfd import HEADER_BYTES, PAYLOAD_START, Slot, complete_header
from rl_ckpt_engine.manifest import DIGEST_BYTES, Manifest, decode_struct
from rl_ckpt_engine.staging import Bucket
from rl_ckpt_engine.stream import Deadline
from rl_protocol.errors import ConfigError, WeightSyncError

DEVICES = "UCX_NET_DEVICES"
"""Environment variable that tells UCX which interfaces to use; read when an agent is made."""
_PACKAGES = ("nixl_cu12", "nixl_cu13")
"""Both work without a GPU."""
_POLL_S = 0.0005
Bytes = npt.NDArray[np.uint8]


class NixlMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Metadata of one member."""

    token: bytes
    """Random name of the engine object."""


class NixlPlacement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the payload is."""

    agent: bytes
    """NIXL's metadata of the sender's agent: how to reach it, and what it has registered."""
    address: int
    """In the sender's process, of the header; the payload begins PAYLOAD_START bytes after it."""


_member_decoder = msgspec.msgpack.Decoder(NixlMember)
_placement_decoder = msgspec.msgpack.Decoder(NixlPlacement)


class Agent:
    """NIXL's agent, with UCX. Memory that was registered stays mapped until the agent is closed: a peer may still know its address.

    Raises:
        ConfigError: NIXL is not installed, or does not load.
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
        """Let UCX move bytes from and to this memory; without effect when it may already."""
        if memory.nbytes and not any(memory is known for known in self._memory):
            with self._named("Registering memory"):
                self._nixl.register_memory([(_address(memory), memory.nbytes, 0, "")], mem_type="DRAM")
            self._memory.append(memory)

    @property
    def metadata(self) -> bytes:
        """For `reach`, with all memory registered so far."""
        with self._named("Describing memory"):
            return bytes(self._nixl.get_agent_metadata())

    def reach(self, metadata: bytes) -> str:
        """The name of the agent with this metadata, which can be read from now on."""
        if self._peer is None or self._peer[0] != metadata:
            with self._named("Reaching the sender"):
                name = self._nixl.add_remote_agent(metadata)
            self._peer = metadata, name if isinstance(name, str) else bytes(name).decode()
        return self._peer[1]

    def read(self, peer: str, address: int, into: Bytes) -> Any:
        """Begin to read from the peer's memory into registered memory of this process; to be awaited with `done`."""
        with self._named("Reading"):
            here = self._nixl.get_xfer_descs([(_address(into), into.nbytes, 0)], mem_type="DRAM")
            there = self._nixl.get_xfer_descs([(address, into.nbytes, 0)], mem_type="DRAM")
            transfer = self._nixl.initialize_xfer("READ", here, there, peer)
            self._nixl.transfer(transfer)
            return transfer

    async def done(self, transfer: Any, deadline: Deadline) -> None:
        """The bytes are there.

        Raises:
            WeightSyncError: the transfer failed, or the deadline passed.
        """
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
        """Whether it is over for certain, whatever became of it."""
        try:
            self._nixl.release_xfer_handle(transfer)
        except self._errors:
            return False
        return True

    def close(self) -> None:
        """End all connections; safe to call twice."""
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


class RegisteredSlot(Slot):
    """A slot that peers can read."""

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self._agent = agent

    @property
    def placement(self) -> bytes:
        """Msgpack of NixlPlacement."""
        self._agent.register(self._bytes)
        return msgspec.msgpack.encode(NixlPlacement(agent=self._agent.metadata, address=_address(self._bytes)))


class NixlEngine(CopyingEngine[RegisteredSlot]):
    """See the module's docstring. A sender's memory is that of its two largest versions, a receiver's that of its largest.

    Raises:
        ConfigError: NIXL is not installed, or does not load.
    """

    API_VERSION: ClassVar[int] = 1
    name: ClassVar[str] = "nixl"
    capabilities: ClassVar[Capabilities] = Capabilities(
        same_host_only=True, zero_copy=False, elastic=True, devices=("cpu",)
    )

    def __init__(self, config: CheckpointEngineConfig | None = None) -> None:
        super().__init__(config)
        _load()
        self._me = NixlMember(token=secrets.token_bytes(DIGEST_BYTES))
        self._agent: Agent | None = None
        self._header: Bytes = np.zeros(HEADER_BYTES, np.uint8)
        self._abandoned: list[Bytes] = []

    def prepare(self) -> bytes:
        """See CheckpointEngine.prepare."""
        return msgspec.msgpack.encode(self._me)

    @classmethod
    def _check_members(cls, sender: bytes, receivers: Sequence[bytes]) -> None:
        for member in (sender, *receivers):
            decode_struct(_member_decoder, member, "metadata of an engine 'nixl'")

    def init_process_group(self, member: bytes) -> None:
        """See CheckpointEngine.init_process_group."""
        if member != self._sender:
            self._hang_up()
        super().init_process_group(member)

    def _connected(self) -> Agent:
        if self._agent is None:
            self._agent = Agent()
        return self._agent

    def _new_place(self) -> RegisteredSlot:
        return RegisteredSlot(self._connected())

    async def _pull(self, manifest: Manifest, buckets: Sequence[Bucket], deadline: Deadline) -> AsyncGenerator[None]:
        placement = decode_struct(_placement_decoder, manifest.placement, "placement of an engine 'nixl'")
        running: list[Any] = []
        finished = False
        agent = self._connected()
        try:
            peer = agent.reach(placement.agent)
            agent.register(self._header)
            agent.register(self._staging.memory)
            running.append(agent.read(peer, placement.address, self._header))
            await agent.done(running[0], deadline)
            running.clear()
            if self._header.tobytes() != complete_header(manifest):
                raise WeightSyncError(
                    f"Version {manifest.version} is not there any more: the sender took it back or went on to a later version. "
                    "A new sync is needed."
                )
            for number, _ in enumerate(buckets):
                for bucket in buckets[number + (number > 0) : number + 2]:
                    into = np.frombuffer(bucket.memory, np.uint8)
                    running.append(agent.read(peer, placement.address + PAYLOAD_START + bucket.start, into))
                await agent.done(running[0], deadline)
                del running[0]
                yield
            finished = True
        finally:
            if not finished:
                self._give_up(agent, running)

    def _give_up(self, agent: Agent, running: list[Any]) -> None:
        """What is under way must not reach memory that is used for something else."""
        over = [agent.cancel(transfer) for transfer in running]
        if not all(over):
            self._abandoned.append(self._staging.memory)
            self._header = self._header.copy()
            self._staging.clear()
        running.clear()
        self._hang_up()

    def _hang_up(self) -> None:
        if self._agent is not None:
            self._agent.close()
            self._agent = None

    def close(self) -> None:
        """See CheckpointEngine.close."""
        self._hang_up()  # before the memory goes: nobody can ask for it any more
        super().close()


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
            logging.getLogger("nixl").setLevel(logging.WARNING)  # it tells standard output about every agent
        errors = tuple(kind for kind in vars(bindings).values() if isclass(kind) and issubclass(kind, Exception))
        return api, errors
    raise ConfigError(
        f"Engine 'nixl' can't be loaded: {'; '.join(reasons)}. Install rl-ckpt-engine[nixl], or nixl-cu13 for CUDA 13."
    )


@contextlib.contextmanager
def _devices() -> Generator[None]:
    """UCX keeps to loopback unless the operator has named interfaces."""
    if DEVICES in os.environ:
        yield
        return
    os.environ[DEVICES] = "lo"
    try:
        yield
    finally:
        del os.environ[DEVICES]


def _address(memory: Bytes) -> int:
    return int(memory.__array_interface__["data"][0])
