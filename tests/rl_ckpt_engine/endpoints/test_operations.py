"""Operations: declared by a signature, called in this process or through encoded requests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import pytest
from ckpt_fakes import Sink, Source, model

from rl_ckpt_engine import FollowerEndpoint, Memory, ReceiverEndpoint, SenderEndpoint, remote
from rl_ckpt_engine.endpoints.operations import MARGIN_S, METHODS, Endpoint, operation
from rl_ckpt_engine.engines.one_host.naive import NaiveEngine
from rl_protocol.errors import WeightSyncError, WorkerError


class Answer(msgspec.Struct):
    text: str
    parts: tuple[Memory, ...]


class Echo(Endpoint):
    @operation
    async def echo(self, data: bytes, part: Memory | None, timeout_s: float) -> Answer:
        return Answer(f"{data!r} {part} {timeout_s}", ("weights",))

    @operation
    async def fail(self) -> None:
        raise WeightSyncError("no such version")

    async def local(self) -> None: ...


class Loud(Echo):
    async def echo(self, data: bytes, part: Memory | None, timeout_s: float) -> Answer:
        answer = await super().echo(data, part, timeout_s)
        return Answer(answer.text.upper(), answer.parts)


class Worker:
    """A caller whose process is this one."""

    name = "rollout-0"

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.calls: list[tuple[str, float]] = []

    async def call(self, method: str, payload: bytes, *, timeout_s: float) -> bytes:
        self.calls.append((method, timeout_s))
        return await self.endpoint.handle(method.removeprefix(METHODS), payload)


def test_a_handle_calls_the_operation_with_typed_arguments_and_result() -> None:
    worker = Worker(Echo())
    handle = remote(Echo, worker)
    assert asyncio.run(handle.echo(b"\x00\xff", None, 2.5)) == Answer("b'\\x00\\xff' None 2.5", ("weights",))
    assert asyncio.run(handle.echo(b"", part="kv_cache", timeout_s=1)).text == "b'' kv_cache 1.0"
    assert worker.calls == [("weights.echo", 2.5 + MARGIN_S), ("weights.echo", 1 + MARGIN_S)]
    assert handle.name == "rollout-0"


def test_an_overridden_operation_keeps_its_declaration() -> None:
    assert asyncio.run(remote(Echo, Worker(Loud())).echo(b"a", "weights", 1.0)).text == "B'A' WEIGHTS 1.0"


def test_errors_of_an_operation_reach_the_caller() -> None:
    with pytest.raises(WeightSyncError, match="no such version"):
        asyncio.run(remote(Echo, Worker(Echo())).fail())


def test_a_handle_has_only_the_operations() -> None:
    handle = remote(Echo, Worker(Echo()))
    with pytest.raises(AttributeError, match="local"):
        handle.local  # noqa: B018 - the access is what is tested
    with pytest.raises(TypeError):
        asyncio.run(handle.echo(b""))


@pytest.mark.parametrize(
    ("method", "request_", "message"),
    [
        ("local", {}, "Echo has no operation 'local'; it has echo, fail"),
        ("handle", {}, "has no operation 'handle'"),
        ("echo", {"data": b"", "part": "disk", "timeout_s": 1.0}, "Echo.echo was sent an unreadable request"),
        ("echo", {"data": b"", "part": None}, "missing required field `timeout_s`"),
        ("fail", {"version": 1}, "unknown field `version`"),
    ],
)
def test_requests_that_fit_no_operation_are_refused(method: str, request_: dict[str, object], message: str) -> None:
    with pytest.raises(WorkerError, match=message):
        asyncio.run(Echo().handle(method, msgspec.msgpack.encode(request_)))


def test_bytes_that_are_no_request_are_refused() -> None:
    with pytest.raises(WorkerError, match=r"Echo\.fail was sent an unreadable request"):
        asyncio.run(Echo().handle("fail", b"\xc1"))


@pytest.mark.parametrize(
    ("endpoint", "operations"),
    [
        (SenderEndpoint, ["prepare", "join", "send", "serve", "finalize", "abort", "republish"]),
        (
            ReceiverEndpoint,
            [
                *("prepare", "join", "pause", "prefetch", "receive", "activate", "resume", "sleep", "wake"),
                *("republish", "relay"),
            ],
        ),
        (FollowerEndpoint, ["follow"]),
    ],
)
def test_the_operations_of_weight_sync(endpoint: type[Endpoint], operations: Sequence[str]) -> None:
    assert list(endpoint.operations) == list(operations)


def test_a_sync_through_encoded_requests() -> None:
    sink = Sink(model(0))
    ends = SenderEndpoint(NaiveEngine(), Source(model(1))), ReceiverEndpoint(NaiveEngine(), sink)
    sender, receiver = remote(SenderEndpoint, Worker(ends[0])), remote(ReceiverEndpoint, Worker(ends[1]))

    async def sync() -> int:
        sent = await sender.send(1, 20)
        ack = await receiver.receive(sent.manifest, 20)
        assert ack.version == 1
        active = await receiver.activate(1, 20)
        await sender.finalize(1)
        return active

    assert asyncio.run(sync()) == 1
    assert sink.loaded == {w.name: w.data.tobytes() for w in model(1)}
    for end in ends:
        end.close()
