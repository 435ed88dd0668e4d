"""What engines have in common whose receivers read the weights, bucket by bucket, out of the sender's memory, through a library that does it.

The sender copies the weights once into memory of its own (see memfd) and lets the library read it; nobody else in its process takes part in
a read. The next bucket is under way while the receiver verifies the last one. A header in front of the payload, read first, tells whether the
version is still there.
"""

from __future__ import annotations

import secrets
from abc import abstractmethod
from collections.abc import AsyncGenerator, Sequence
from typing import Generic, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from rl_ckpt_engine.config import CheckpointEngineConfig
from rl_ckpt_engine.engines.copying import CopyingEngine
from rl_ckpt_engine.engines.memfd import HEADER_BYTES, PAYLOAD_START, Slot, complete_header
from rl_ckpt_engine.manifest import DIGEST_BYTES, Manifest, decode_struct
from rl_ckpt_engine.staging import Bucket
from rl_ckpt_engine.stream import Deadline
from rl_protocol.errors import WeightSyncError

Bytes = npt.NDArray[np.uint8]
T = TypeVar("T")


class Agent(Protocol[T]):
    """This process's end of the library; T is a read that is under way. Memory that was registered stays mapped until the agent is closed, for a
    peer may still know its address."""

    def register(self, memory: Bytes) -> None:
        """Let the library move bytes from and to this memory; without effect when it may already."""
        ...

    @property
    def metadata(self) -> bytes:
        """For `reach`, with all memory registered so far."""
        ...

    def reach(self, metadata: bytes) -> str:
        """The name of the agent with this metadata, which can be read from now on."""
        ...

    def read(self, peer: str, address: int, into: Bytes) -> T:
        """Begin to read from the peer's memory into registered memory of this process; to be awaited with `done`."""
        ...

    async def done(self, transfer: T, deadline: Deadline) -> None:
        """The bytes are there.

        Raises:
            WeightSyncError: the transfer failed, or the deadline passed.
        """
        ...

    def cancel(self, transfer: T) -> bool:
        """Whether it is over for certain, whatever became of it."""
        ...

    def close(self) -> None:
        """End all connections; safe to call twice."""
        ...


class ReadMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Metadata of one member."""

    token: bytes
    """Random name of the engine object."""


class ReadPlacement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the payload is."""

    agent: bytes
    """Metadata of the sender's agent: how to reach it, and what it has registered."""
    address: int
    """In the sender's process, of the header; the payload begins PAYLOAD_START bytes after it."""


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


class ReadingEngine(CopyingEngine[RegisteredSlot[T]]):
    """See the module's docstring. A sender's memory is that of its two largest versions, a receiver's that of its largest."""

    def __init__(self, config: CheckpointEngineConfig | None = None) -> None:
        super().__init__(config)
        self._me = ReadMember(token=secrets.token_bytes(DIGEST_BYTES))
        self._agent: Agent[T] | None = None
        self._header: Bytes = np.zeros(HEADER_BYTES, np.uint8)
        self._abandoned: list[Bytes] = []

    @abstractmethod
    def _new_agent(self) -> Agent[T]:
        """This process's end; WeightSyncError when the library can't be used."""

    def prepare(self) -> bytes:
        """See CheckpointEngine.prepare."""
        return msgspec.msgpack.encode(self._me)

    @classmethod
    def _check_members(cls, sender: bytes, receivers: Sequence[bytes]) -> None:
        for member in (sender, *receivers):
            decode_struct(_member_decoder, member, f"metadata of an engine {cls.name!r}")

    def init_process_group(self, member: bytes) -> None:
        """See CheckpointEngine.init_process_group."""
        if member != self._sender:
            self._hang_up()
        super().init_process_group(member)

    def _connected(self) -> Agent[T]:
        if self._agent is None:
            self._agent = self._new_agent()
        return self._agent

    def _new_place(self) -> RegisteredSlot[T]:
        return RegisteredSlot(self._connected())

    async def _pull(self, manifest: Manifest, buckets: Sequence[Bucket], deadline: Deadline) -> AsyncGenerator[None]:
        placement = decode_struct(_placement_decoder, manifest.placement, f"placement of an engine {self.name!r}")
        running: list[T] = []
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

    def _give_up(self, agent: Agent[T], running: list[T]) -> None:
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


def address_of(memory: Bytes) -> int:
    """Where it begins in this process."""
    return int(memory.__array_interface__["data"][0])
