"""RemoteReads: receivers read the sender's memory through a library such as NIXL.

The sender copies the weights once into memory that it registers with the library (see
shared_memory) and takes no part in the reads. A receiver reads the header first, to check that the
version is still available, and then the buckets; the next bucket is transferred while it verifies
the last one.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import ClassVar, Generic, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from rl_ckpt_engine.engines.base.memfd import HEADER_BYTES, PAYLOAD_START, Slot, address_of, complete_header
from rl_ckpt_engine.engines.base.receive_buffer import Bucket, ReceiveBuffer
from rl_ckpt_engine.payload.block_stream import Deadline
from rl_ckpt_engine.payload.manifest import DIGEST_BYTES, Manifest, decode_struct
from rl_protocol.errors import WeightSyncError

Bytes = npt.NDArray[np.uint8]
T = TypeVar("T")


class Agent(Protocol[T]):
    """This process's endpoint of the library; T is a running read.

    Registered memory stays mapped until the agent is closed, because a peer may still use its
    address.
    """

    def register(self, memory: Bytes) -> None:
        """Register memory for reads from and to it; idempotent."""
        ...

    @property
    def metadata(self) -> bytes:
        """Metadata for `reach`, including all memory registered so far."""
        ...

    def reach(self, metadata: bytes) -> str:
        """Make the agent with this metadata readable; returns its name."""
        ...

    def read(self, peer: str, address: int, into: Bytes) -> T:
        """Start a read from the peer's memory into registered memory; await it with `done`."""
        ...

    async def done(self, transfer: T, deadline: Deadline) -> None:
        """Wait until the bytes have arrived.

        Raises:
            WeightSyncError: the transfer failed, or the deadline passed.
        """
        ...

    def cancel(self, transfer: T) -> bool:
        """Cancel the read; returns whether it has certainly ended."""
        ...

    def close(self) -> None:
        """End all connections; safe to call twice."""
        ...


class ReadMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Metadata of one member."""

    token: bytes
    """Random id of the engine object."""


class ReadPlacement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Location of the payload."""

    agent: bytes
    """Metadata of the sender's agent: its address and registered memory."""
    address: int
    """Address of the header in the sender's process; the payload begins PAYLOAD_START bytes
    later."""


_member_decoder = msgspec.msgpack.Decoder(ReadMember)
_placement_decoder = msgspec.msgpack.Decoder(ReadPlacement)


class RegisteredSlot(Slot, Generic[T]):
    """A slot that peers can read."""

    def __init__(self, agent: Agent[T]) -> None:
        super().__init__()
        self._agent = agent

    @property
    def placement(self) -> bytes:
        """Msgpack of ReadPlacement."""
        self._agent.register(self._bytes)
        return msgspec.msgpack.encode(ReadPlacement(agent=self._agent.metadata, address=address_of(self._bytes)))


class RemoteReads(Generic[T]):
    """The part of an engine that registers a sender's memory and reads it at a receiver.

    A sender's memory is that of its two largest versions, a receiver's that of its largest.

    Args:
        engine: name of the engine, for messages.
        new_agent: creates this process's agent; a WeightSyncError says why it can't.
        buffer: the receiver's memory.
    """

    def __init__(self, engine: str, new_agent: Callable[[], Agent[T]], buffer: ReceiveBuffer) -> None:
        self._engine = engine
        self._new_agent = new_agent
        self._buffer = buffer
        self._me = ReadMember(token=secrets.token_bytes(DIGEST_BYTES))
        self._agent: Agent[T] | None = None
        self._header: Bytes = np.zeros(HEADER_BYTES, np.uint8)
        self._abandoned: list[Bytes] = []

    def member(self) -> bytes:
        """This member's metadata."""
        return msgspec.msgpack.encode(self._me)

    def _connected(self) -> Agent[T]:
        if self._agent is None:
            self._agent = self._new_agent()
        return self._agent

    def new_slot(self) -> RegisteredSlot[T]:
        """Memory for one version at the sender."""
        return RegisteredSlot(self._connected())

    async def pull(self, manifest: Manifest, buckets: Sequence[Bucket], deadline: Deadline) -> AsyncGenerator[None]:
        """Fill the memory of each bucket in order and yield after each.

        Raises:
            WeightSyncError: the version is gone, the sender died, or the deadline passed.
        """
        placement = decode_struct(_placement_decoder, manifest.placement, f"placement of an engine {self._engine!r}")
        running: list[T] = []
        finished = False
        agent = self._connected()
        try:
            peer = agent.reach(placement.agent)
            agent.register(self._header)
            agent.register(self._buffer.memory)
            running.append(agent.read(peer, placement.address, self._header))
            await agent.done(running[0], deadline)
            running.clear()
            if self._header.tobytes() != complete_header(manifest):
                raise WeightSyncError(
                    f"Version {manifest.version} is no longer available: the sender withdrew it or has a later version. "
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

    def _give_up(self, agent: Agent[T], running: list[T]) -> None:
        """Cancel running reads; memory they may still write to is not reused."""
        over = [agent.cancel(transfer) for transfer in running]
        if not all(over):
            self._abandoned.append(self._buffer.memory)
            self._header = self._header.copy()
            self._buffer.clear()
        running.clear()
        self.hang_up()

    def hang_up(self) -> None:
        """End all connections; the next use makes new ones."""
        if self._agent is not None:
            self._agent.close()
            self._agent = None


class ReadsRemotely(Generic[T]):
    """Mixin of engines whose connections are a RemoteReads, which they create."""

    name: ClassVar[str]
    _reads: RemoteReads[T]

    def prepare(self) -> bytes:
        return self._reads.member()

    @classmethod
    def _check_members(cls, sender: bytes, receivers: Sequence[bytes]) -> None:
        for member in (sender, *receivers):
            decode_struct(_member_decoder, member, f"metadata of an engine {cls.name!r}")

    def _forget_sender(self) -> None:
        self._reads.hang_up()

    def _new_store(self) -> RegisteredSlot[T]:
        return self._reads.new_slot()

    def _pull(self, manifest: Manifest, buckets: Sequence[Bucket], deadline: Deadline) -> AsyncGenerator[None]:
        return self._reads.pull(manifest, buckets, deadline)
