"""Attacks on a live plane get an error or no answer, and do not affect a healthy client.

Messages are generated from the types in `messages`, so new message types are included.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec
import numpy as np
import psutil
import pytest
from msgspec import inspect

from rl_protocol import BatchData, ObjectColumn, dense, ragged
from rl_protocol.wire import plan
from rl_transferqueue import Client, LocalPlane, PlaneDescriptor, TransferQueueConfig, connect, start_local_plane
from rl_transferqueue.transport.unix_link import SCHEME, Frames
from rl_transferqueue.wire.messages import MAX_FRAME, Failure, GetStats, Hello, Reply, Request, pack
from rl_transferqueue.wire.process_liveness import this_process

WORST_S = 60.0
"""Longest time for a call of the healthy client on a busy machine; a stuck server takes longer."""
LAST = Request(1 << 40, GetStats())
"""The request whose answer is the last one that a peer reads."""
MEMORY = 96 << 20
"""Most bytes by which the memory of the plane's processes may grow in total during an attack."""


# --------------------------------------------------------------------------------
# Random messages
class Liar:
    """Generates random values of the types that a message declares, as msgpack builtins."""

    numbers = (0, 1, 2, 7, 255, 2**31 - 1, 2**31, 2**48, 2**62, -1, 2**63)
    texts = ("", "p", "train", "healthy", "x", "k0", "\u00fc" * 9, "a" * 3000)

    def __init__(self, seed: int, *, healthy: bool = False) -> None:
        self.dice = random.Random(seed)
        self.texts = self.texts if healthy else tuple(text for text in type(self).texts if text != "healthy")
        self.header = msgspec.msgpack.encode(plan(BatchData({"x": dense([1.0, 2.0]), "r": ragged([[1], []], "int8")})))
        self.kinds: dict[type, Callable[[Any], Any]] = {
            inspect.NoneType: lambda kind: None,
            inspect.BoolType: lambda kind: self.dice.random() < 0.5,
            inspect.IntType: lambda kind: self.dice.choice(self.numbers[: 9 if kind.ge == 0 else None]),
            inspect.FloatType: lambda kind: self.dice.choice([0.0, 0.001, 0.02]),
            inspect.StrType: lambda kind: self.dice.choice(self.texts),
            inspect.BytesType: lambda kind: self.dice.choice(
                [b"", b"\0" * 8, os.urandom(16), b"\xff" * 80, self.header]
            ),
            inspect.UnionType: lambda kind: self.value(self.dice.choice(kind.types)),
            inspect.VarTupleType: lambda kind: [
                self.value(kind.item_type) for _ in range(self.dice.choice([0, 1, 2, 9]))
            ],
            inspect.ListType: lambda kind: [self.value(kind.item_type) for _ in range(self.dice.choice([0, 1, 9]))],
            inspect.TupleType: lambda kind: [self.value(item) for item in kind.item_types],
            inspect.DictType: lambda kind: {
                self.value(kind.key_type): self.value(kind.value_type) for _ in range(self.dice.choice([0, 1, 3]))
            },
            inspect.StructType: self.struct,
        }

    def value(self, kind: inspect.Type) -> Any:
        return self.kinds[type(kind)](kind)

    def struct(self, kind: inspect.StructType) -> Any:
        values = [self.value(f.type) for f in kind.fields]
        return [kind.tag, *values] if kind.tag is not None else values

    def frames(self, count: int) -> list[bytes]:
        """Return requests with the ids 2, 3, ...; most of them can be decoded."""
        body = next(f.type for f in self.struct_of(Request).fields if f.name == "body")
        return [msgspec.msgpack.encode([i + 2, self.value(body)]) for i in range(count)]

    @staticmethod
    def struct_of(message: type[msgspec.Struct]) -> inspect.StructType:
        kind = inspect.type_info(message)
        assert isinstance(kind, inspect.StructType)
        return kind


# --------------------------------------------------------------------------------
# Attacks
class Peer:
    """Sends arbitrary frames; the first one is its identity, as the protocol requires."""

    def __init__(self, address: str, identity: bytes | None = None) -> None:
        self._stream = socket.socket(socket.AF_UNIX)
        self._stream.settimeout(60)
        self._stream.connect(address.removeprefix(SCHEME))
        self._frames = Frames()
        self._heard: list[Reply] = []
        self.send(identity or session())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def send(self, frame: bytes, *, deaf: bool = False) -> None:
        """Send a frame, and read the answers that have arrived unless `deaf`.

        A server does not read from a peer that does not read its answers.
        """
        self._stream.sendall(len(frame).to_bytes(4, "little") + frame)
        if not deaf:
            self._stream.settimeout(0)
            with contextlib.suppress(BlockingIOError, ConnectionResetError):
                while self._receive():
                    pass
            self._stream.settimeout(60)

    def answers(self) -> list[Reply]:
        """Return all answers to the frames so far, or those until the connection was closed."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.send(pack(LAST))
            while not any(reply.id == LAST.id for reply in self._heard):
                if not self._receive():
                    break
        out, self._heard = [reply for reply in self._heard if reply.id != LAST.id], []
        return out

    def _receive(self) -> bool:
        """Read once; return whether the connection is still open."""
        data = self._stream.recv(1 << 16)
        self._heard += [msgspec.msgpack.decode(frame, type=Reply) for frame in self._frames.feed(data)]
        return bool(data)


def session() -> bytes:
    return b"\x03" + os.urandom(7)


def stream_garbage(address: str, seed: int) -> None:
    """Random bytes, truncated frames, impossible lengths, and connections that send nothing."""
    dice = random.Random(seed)
    openings = (b"", b"\x08\0", b"\xff" * 4, b"\x08\0\0\0" + b"x" * 7, dice.randbytes(500), bytes(4), bytes(400))
    with contextlib.ExitStack() as stack:
        for i in range(70):
            stream = stack.enter_context(socket.socket(socket.AF_UNIX))
            stream.connect(address.removeprefix(SCHEME))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                stream.sendall(openings[i % len(openings)])


def random_frames(address: str, seed: int) -> None:
    dice = random.Random(seed)
    with Peer(address) as peer:
        for size in range(100):
            peer.send(dice.randbytes(size))
        replies = peer.answers()
        assert len(replies) == 100
        assert all(isinstance(reply.body, Failure) for reply in replies)


def an_identity_that_is_taken(address: str, seed: int) -> None:
    mine = session()
    with Peer(address, mine) as first:
        first.send(b"hello")
        assert first.answers()
        with Peer(address, mine) as second:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                for frame in Liar(seed).frames(20):
                    second.send(frame)
            assert second.answers() == []
        first.send(b"still there")
        assert first.answers()


def truncated_frames(address: str, seed: int) -> None:
    """Every prefix of well-formed requests, up to 60 bytes."""
    with Peer(address) as peer:
        for frame in Liar(seed).frames(12):
            for cut in range(min(len(frame), 60)):
                peer.send(frame[:cut])
        assert all(isinstance(reply.body, Failure) for reply in peer.answers())


def flipped_frames(address: str, seed: int) -> None:
    dice = random.Random(seed)
    with Peer(address) as peer:
        peer.send(pack(Request(1, Hello(this_process()))))
        for frame in Liar(seed).frames(150):
            damaged = bytearray(frame)
            for _ in range(dice.choice([1, 2, 5])):
                damaged[dice.randrange(len(damaged))] ^= 1 << dice.randrange(8)
            peer.send(bytes(damaged))
        assert peer.answers()


def lies_without_introduction(address: str, seed: int) -> None:
    with Peer(address) as peer:
        for frame in Liar(seed).frames(150):
            peer.send(frame)
        assert peer.answers()


def lies_of_a_known_session(address: str, seed: int) -> None:
    with Peer(address) as peer:
        peer.send(pack(Request(1, Hello(this_process()))))
        for frame in Liar(seed).frames(300):
            peer.send(frame)
        assert peer.answers()


def the_name_of_the_controller(address: str, seed: int) -> None:
    """The controller already has this name, so a unit (seed > 0) must not accept the peer."""
    with Peer(address, b"controller") as peer, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for frame in Liar(seed, healthy=seed > 0).frames(200):
            peer.send(frame)
        peer.answers()


def a_frame_beyond_the_limit(address: str, seed: int) -> None:
    with Peer(address) as peer, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        peer.send(bytes(MAX_FRAME + 1))
        assert peer.answers() == []


def announced_sizes(address: str, seed: int) -> None:
    """Messages that announce gigabytes and then end."""
    with Peer(address) as peer:
        for opening in (
            b"\xdd\xff\xff\xff\xff",
            b"\xdf\xff\xff\xff\xff",
            b"\xc6\xff\xff\xff\xff",
            b"\xdb\xff\xff\xff\xff",
        ):
            peer.send(opening)
            peer.send(b"\x92\x05" + opening)
            peer.send(b"\x92\x05\x92\xa5Hello" + opening)
        peer.send(b"\x91" * 100_000)
        assert all(isinstance(reply.body, Failure) for reply in peer.answers())


def requests_without_reading(address: str, seed: int) -> None:
    """The server does not read from a peer that does not read, so answers do not pile up."""
    with Peer(address) as peer, contextlib.suppress(TimeoutError):
        peer._stream.settimeout(2)
        for _ in range(20_000):
            peer.send(b"\x92\x05\x91\xa8GetStats", deaf=True)


ATTACKS = [
    stream_garbage,
    random_frames,
    an_identity_that_is_taken,
    truncated_frames,
    flipped_frames,
    lies_without_introduction,
    lies_of_a_known_session,
    the_name_of_the_controller,
    a_frame_beyond_the_limit,
    announced_sizes,
    requests_without_reading,
]


# --------------------------------------------------------------------------------
# A healthy client
@dataclass
class Healthy:
    """Puts, gets and clears rows in every round, and keeps rows that must not change."""

    client: Client
    rounds: int = 0
    worst_s: float = 0.0
    kept: BatchData = field(
        default_factory=lambda: BatchData(
            {
                "x": dense(np.arange(40_000).reshape(8, 5000)),
                "r": ragged([np.arange(i) for i in range(8)], "int64"),
                "o": ObjectColumn.from_values([{"row": i} for i in range(8)]),
            }
        )
    )

    async def begin(self) -> None:
        self.meta = await self.client.put("healthy", [f"kept{i}" for i in range(8)], self.kept)
        self.view = await self.client.get(self.meta)

    async def round(self) -> None:
        began = time.monotonic()
        i = self.rounds
        meta = await self.client.put("healthy", [f"k{i}"], BatchData({"x": dense([[i] * 5000])}), tags=[{"n": i}])
        assert (await self.client.get(meta)).dense("x").values[0, 0] == i
        ready = await self.client.wait_ready("healthy", count=1, where={"n": i}, task=f"t{i}", timeout_s=WORST_S)
        assert ready.keys == (f"k{i}",)
        assert await self.client.clear("healthy", [f"k{i}"]) == 1
        self.rounds += 1
        self.worst_s = max(self.worst_s, time.monotonic() - began)

    async def check(self) -> None:
        for batch in (self.view, await self.client.get(self.meta)):
            assert (batch.dense("x").values == self.kept.dense("x").values).all()
            assert batch.ragged("r").lengths.tolist() == list(range(8))
            assert batch.objects("o").values() == [{"row": i} for i in range(8)]


@pytest.fixture(scope="module")
def own_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPlane]:
    """Yield a separate plane, because peers that allocate without `Hello` may leak its memory."""
    logs = tmp_path_factory.mktemp("logs")
    with start_local_plane(TransferQueueConfig(capacity_mb=64, segment_mb=1), log_dir=logs) as plane:
        yield plane
    for log in logs.iterdir():
        assert "Traceback" not in log.read_text(), log.read_text()[-3000:]


def servers(descriptor: PlaneDescriptor) -> Sequence[str]:
    return [descriptor.controller.address, *(unit.address for unit in descriptor.units)]


def resident(plane: LocalPlane) -> int:
    """Return the private memory of the plane's processes in bytes, without the shared arenas."""
    infos = [psutil.Process(pid).memory_info() for pid in plane.pids]
    return sum(info.rss - info.shared for info in infos)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_an_attack_is_not_noticed_by_others(own_plane: LocalPlane, attack: Callable[[str, int], None]) -> None:
    async def main() -> None:
        async with await connect(own_plane.descriptor) as client:
            healthy = Healthy(client)
            await healthy.begin()
            for _ in range(5):
                await healthy.round()
            before = resident(own_plane)
            for seed, address in enumerate(servers(own_plane.descriptor)):
                attacking = asyncio.ensure_future(asyncio.to_thread(attack, address, seed))
                while not attacking.done():
                    await healthy.round()
                await attacking
            for _ in range(5):
                await healthy.round()
            await healthy.check()
            assert healthy.rounds >= 12
            assert healthy.worst_s < WORST_S
            assert resident(own_plane) - before < MEMORY
            del healthy
        async with await connect(own_plane.descriptor) as cleaner:
            for partition in (await cleaner.stats()).rows:
                await cleaner.clear(partition)
        assert all(psutil.pid_exists(pid) for pid in own_plane.pids)

    asyncio.run(main())


def test_the_liar_covers_the_whole_protocol() -> None:
    """Every message type is generated, and most of the requests can be decoded."""
    made, readable = set[str](), 0
    frames = Liar(0).frames(2000)
    for frame in frames:
        with contextlib.suppress(msgspec.DecodeError):
            made.add(type(msgspec.msgpack.decode(frame, type=Request).body).__name__)
            readable += 1
    body = next(f.type for f in Liar.struct_of(Request).fields if f.name == "body")
    assert isinstance(body, inspect.UnionType)
    assert made == {kind.cls.__name__ for kind in body.types if isinstance(kind, inspect.StructType)}
    assert readable > len(frames) / 2
