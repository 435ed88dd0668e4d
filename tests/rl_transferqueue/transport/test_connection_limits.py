"""Limits on peers that do not read, stop in the middle of a frame, or send nothing."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import socket
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest
import zmq
from network_helpers import MIB, NO_KEY, rows_of, running, served
from polling import until

from rl_protocol import PlaneLostError
from rl_protocol.errors import WireError
from rl_protocol.support.host_identity import this_host
from rl_transferqueue import Client, LocalPlane, TransferQueueConfig, connect, start_local_plane
from rl_transferqueue.transport.bulk_client import BulkConnection, dial
from rl_transferqueue.transport.bulk_protocol import ReadRows, Sending, WantedPiece, frame
from rl_transferqueue.transport.bulk_server import BulkServer
from rl_transferqueue.transport.connection_limits import DEFAULT, Limits
from rl_transferqueue.transport.control_server import Caller, Server
from rl_transferqueue.transport.event_loop import Reactor
from rl_transferqueue.transport.listener import Listener
from rl_transferqueue.transport.unix_link import SCHEME, Frames
from rl_transferqueue.wire.descriptor import UnitAddress
from rl_transferqueue.wire.messages import (
    CONTROLLER,
    NOTICE,
    Answer,
    AnyRequest,
    Done,
    GetStats,
    Hello,
    ListRows,
    Locate,
    Located,
    Reclaim,
    Reply,
    Request,
    Reserve,
    Rows,
    pack,
)
from rl_transferqueue.wire.process_liveness import this_process

SOON = Limits(warn_s=0.1, stall_s=0.3)
"""Ends stalled connections soon, but leaves time for the handshake on a slow machine."""
LARGE = Rows(("k" * 700_000,), (), (), b"")
"""An answer of 0.7 MB."""
HUGE = Rows(("k" * 3_000_000,), (), (), b"")
"""An answer of 3 MB, which `ListRows` of the partition "huge" gets."""


class Served:
    """A server that answers `ListRows` with large and `GetStats` with small messages."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        self.reactor = Reactor()
        self.address = f"{SCHEME}{folder / 's'}"
        self.ended: list[bytes] = []
        self.served = 0
        self.stops_at_small = False
        handlers: dict[type, Callable[[Caller, AnyRequest], Answer]] = {ListRows: self._list, GetStats: self._small}
        self.server = Server(self.reactor, self.address, handlers, on_end=self.ended.append, limits=limits)

    def _list(self, caller: Caller, message: AnyRequest) -> Answer:
        self.served += 1
        assert isinstance(message, ListRows)
        return HUGE if message.partition == "huge" else LARGE

    def _small(self, caller: Caller, message: AnyRequest) -> Answer:
        if self.stops_at_small:
            self.reactor.stop()
        return Done()

    def until_small(self) -> None:
        """Run the reactor in this thread until a small request is answered."""
        self.stops_at_small = True
        self.reactor.call_later(60, self.reactor.stop)
        self.reactor.run()


@contextlib.contextmanager
def serving(folder: Path, limits: Limits = DEFAULT) -> Iterator[Served]:
    it = Served(folder, limits)
    try:
        with running(it.reactor):
            yield it
    finally:
        it.server.close()


class Peer:
    """A Unix connection that reads only in `hear` and `until_closed`."""

    def __init__(self, address: str, identity: bytes | None = None) -> None:
        self.session = os.urandom(8)
        self.stream = socket.socket(socket.AF_UNIX)
        self.stream.settimeout(60)
        self.stream.connect(address.removeprefix(SCHEME))
        self._frames = Frames()
        self._heard: list[Reply] = []
        if identity != b"":
            self.send(identity or self.session)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()

    def send(self, *frames: bytes) -> None:
        """Send all frames in one call, because many small writes fill the socket buffer sooner."""
        self.stream.sendall(b"".join(len(packed).to_bytes(4, "little") + packed for packed in frames))

    def ask(self, number: int, body: AnyRequest) -> None:
        self.send(pack(Request(number, body)))

    def hear(self) -> Reply:
        while not self._heard:
            data = self.stream.recv(1 << 18)
            assert data, "the server has closed the connection"
            self._heard += [msgspec.msgpack.decode(part, type=Reply) for part in self._frames.feed(data)]
        return self._heard.pop(0)

    def until_closed(self) -> None:
        with contextlib.suppress(ConnectionResetError):
            while self.stream.recv(1 << 18):
                pass


def a_list() -> ListRows:
    return ListRows("p", {})


def all_is_read(address: str) -> None:
    """Wait until the server has read everything that was sent before."""
    with Peer(address) as other:
        for number in range(3):
            other.ask(number, GetStats())
            assert isinstance(other.hear().body, Done)


# --------------------------------------------------------------------------------
# Clients that do not read
def test_requests_of_a_client_that_does_not_read_are_not_handled_until_it_does(tmp_path: Path) -> None:
    """The 400 requests, for answers of 280 MiB, fit into the socket buffer."""
    with serving(tmp_path) as it, Peer(it.address) as deaf:
        deaf.send(*(pack(Request(number, a_list())) for number in range(400)))
        all_is_read(it.address)
        assert it.served < 10
        for number in range(400):
            assert deaf.hear() == Reply(number, LARGE)
        assert it.served == 400


def test_a_client_that_takes_nothing_is_ended_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(tmp_path, SOON) as it, Peer(it.address) as deaf:
        deaf.send(*(pack(Request(number, a_list())) for number in range(10)))
        until(lambda: it.ended == [deaf.session], "the connection is ended")
        deaf.until_closed()
        all_is_read(it.address)
    assert f"the connection of pid {os.getpid()} is ended: " in caplog.text
    assert "wait to be sent to it, for 0.3 s" in caplog.text


def test_notices_for_a_client_that_does_not_read_do_not_pile_up(tmp_path: Path) -> None:
    """Other clients cause notices, so it is not enough to stop reading from this one."""
    it = Served(tmp_path, Limits(queue_bytes=MIB))
    with Peer(it.address) as deaf:
        deaf.ask(1, GetStats())
        it.until_small()
        for _ in range(10):
            it.server.answer(Caller(deaf.session, NOTICE), LARGE)
            it.server.answer(Caller(deaf.session, NOTICE), Reclaim())
        assert it.ended == [], "who answers it may be answering others, too"
        it.reactor._fire()
        assert it.ended == [deaf.session]
    it.server.close()


def test_a_connection_that_stalls_is_named_before_it_is_ended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(tmp_path, Limits(warn_s=0.1)) as it, Peer(it.address) as deaf:
        for number in range(3):
            deaf.ask(number, a_list())
        until(lambda: f"the connection of pid {os.getpid()} stalls: " in caplog.text, "the log names it")
        for number in range(3):
            assert deaf.hear() == Reply(number, LARGE)
        assert it.ended == []


# --------------------------------------------------------------------------------
# Half-sent frames
def test_a_frame_that_stops_midway_is_given_back_after_a_while(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(tmp_path, SOON) as it, Peer(it.address) as half:
        half.ask(1, GetStats())
        half.hear()
        half.stream.sendall((60 * MIB).to_bytes(4, "little") + bytes(1000))
        half.until_closed()
        until(lambda: it.ended == [half.session], "the end is told")
    assert "it has sent 1004 bytes of a frame and stopped" in caplog.text


def test_a_frame_that_stops_midway_is_given_back_when_the_connection_ends(tmp_path: Path) -> None:
    gc.collect()
    gc.disable()  # the memory must be freed without the garbage collector
    tracemalloc.start()
    try:
        with serving(tmp_path) as it:
            with Peer(it.address) as half:
                half.ask(1, GetStats())
                half.hear()
                before, _ = tracemalloc.get_traced_memory()
                half.stream.sendall((60 * MIB).to_bytes(4, "little") + bytes(20 * MIB))
                until(lambda: tracemalloc.get_traced_memory()[0] > before + 19 * MIB, "half a frame has come")
            until(lambda: it.ended == [half.session], "the end is noticed")
            assert tracemalloc.get_traced_memory()[0] < before + 2 * MIB
    finally:
        tracemalloc.stop()
        gc.enable()


# --------------------------------------------------------------------------------
# Silent connections
@pytest.mark.parametrize("identity", [b"", None], ids=["nothing at all", "who it is and no more"])
def test_a_connection_that_asks_for_nothing_is_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, identity: bytes | None
) -> None:
    it = Served(tmp_path, Limits(handshake_s=0.1))
    with Peer(it.address, identity) as silent, running(it.reactor):  # it has spoken when its time begins
        silent.until_closed()
        until(lambda: not it.server._strangers and not it.server._peers, "the server has forgotten it")
    it.server.close()
    assert "it has not said who it is and what it asks for within 0.1 s" in caplog.text


def test_a_client_that_is_idle_stays(tmp_path: Path) -> None:
    with serving(tmp_path, SOON) as it, Peer(it.address) as idle:
        for number in range(2):
            idle.ask(number, GetStats())
            assert idle.hear() == Reply(number, Done())
            time.sleep(0.5)
        assert it.ended == []


def test_the_controller_may_be_silent_and_stop(tmp_path: Path) -> None:
    it = Served(tmp_path, Limits(handshake_s=0.1, warn_s=0.1, stall_s=0.2))
    with Peer(it.address, CONTROLLER) as peer, running(it.reactor):  # it has spoken when its time begins
        time.sleep(0.3)
        for number in range(4):
            peer.ask(number, a_list())
        time.sleep(0.5)
        for number in range(4):
            assert peer.hear() == Reply(number, LARGE)
        assert it.ended == []
    it.server.close()


def test_a_session_ends_with_its_connection_and_its_leases_with_the_process() -> None:
    config = TransferQueueConfig(num_storage_units=1, capacity_mb=8, segment_mb=1)

    async def reserved(client: Client, nbytes: int) -> None:
        deadline = time.monotonic() + 60
        while (await client.stats()).bytes_reserved != nbytes:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)

    async def main(plane: LocalPlane) -> None:
        async with await connect(plane.descriptor) as client:
            await client.put("p", ["a"], rows_of(7, MIB))
            with Peer(plane.descriptor.controller.address) as other:
                other.ask(1, Hello(this_process()))
                other.ask(2, Reserve(5 * MIB, 0))
                other.ask(3, Locate(1, "p", ("a",), ("x",), 0.0))
                await reserved(client, 5 * MIB)
                assert isinstance([other.hear() for _ in range(3)][2].body, Located)
            await reserved(client, 0)
            await client.clear("p")
            assert (await client.stats()).bytes_used == MIB

    with start_local_plane(config) as plane:
        asyncio.run(main(plane))


# --------------------------------------------------------------------------------
# Clients over TCP
@contextlib.contextmanager
def dealer(endpoint: str, identity: bytes = b"deaf") -> Iterator[zmq.Socket[bytes]]:
    """Yield a client that buffers only one answer while it does not read."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context.socket(zmq.DEALER) as client:
        client.setsockopt(zmq.IDENTITY, identity)
        client.setsockopt(zmq.RCVHWM, 1)
        client.setsockopt(zmq.RCVBUF, 1 << 16)
        client.setsockopt(zmq.LINGER, 0)
        client.setsockopt(zmq.RCVTIMEO, 60_000)
        client.connect(endpoint)
        yield client
    context.term()


def small_answers(endpoint: str) -> None:
    """Check that another client is served."""
    with dealer(endpoint, os.urandom(8)) as other:
        # More requests than the first client has sent; the server alternates between the two.
        for number in range(300):
            other.send(pack(Request(number, GetStats())))
            assert msgspec.msgpack.decode(other.recv(), type=Reply) == Reply(number, Done())


def test_requests_over_tcp_of_a_client_that_does_not_read_are_not_handled_until_it_does(tmp_path: Path) -> None:
    it = Served(tmp_path, DEFAULT)
    endpoint = it.server.listen("127.0.0.1", NO_KEY)
    with running(it.reactor), dealer(endpoint) as deaf:
        for number in range(200):
            deaf.send(pack(Request(number, a_list())))
        until(lambda: it.served > 0, "a request is served")
        small_answers(endpoint)
        assert it.served < 80  # 32 answers in the server, 1 in the client, some MiB in the kernel
        for number in range(200):
            assert msgspec.msgpack.decode(deaf.recv(), type=Reply) == Reply(number, LARGE)
        assert it.served == 200
        small_answers(endpoint)
    it.server.close()


def test_large_answers_over_tcp_wait_for_each_other(tmp_path: Path) -> None:
    it = Served(tmp_path, DEFAULT)
    endpoint = it.server.listen("127.0.0.1", NO_KEY)
    with running(it.reactor), dealer(endpoint) as deaf:
        for number in range(30):
            deaf.send(pack(Request(number, ListRows("huge", {}))))
        small_answers(endpoint)
        assert it.served < 12  # 1 answer in the server, 1 in the client, some MiB in the kernel
        for number in range(30):
            assert msgspec.msgpack.decode(deaf.recv(), type=Reply) == Reply(number, HUGE)
    it.server.close()


def test_a_client_over_tcp_that_takes_nothing_is_ended_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    it = Served(tmp_path, SOON)
    endpoint = it.server.listen("127.0.0.1", NO_KEY)
    with running(it.reactor), dealer(endpoint) as deaf:
        for number in range(200):
            deaf.send(pack(Request(number, a_list())))
        until(lambda: b"deaf" in it.ended, "the session is ended")
    it.server.close()
    assert f"session {b'deaf'.hex()} of another host is ended: " in caplog.text


def test_what_waits_for_a_client_over_tcp_is_bounded(tmp_path: Path) -> None:
    it = Served(tmp_path, Limits(queue_bytes=4 * MIB))
    endpoint = it.server.listen("127.0.0.1", NO_KEY)
    with dealer(endpoint) as deaf:
        deaf.send(pack(Request(1, GetStats())))
        it.until_small()
        deaf.recv()
        for _ in range(100):
            it.server.answer(Caller(b"deaf", NOTICE), LARGE)
        assert it.ended == [], "who answers it may be answering others, too"
        it.reactor._fire()
        assert it.ended == [b"deaf"]
    it.server.close()


@pytest.mark.parametrize("descriptors", ["left", "used up"])
def test_a_client_of_another_host_that_is_ended_sees_it(monkeypatch: pytest.MonkeyPatch, descriptors: str) -> None:
    """The controller can't send to it, but can close its lifeline, which is another connection."""
    servers: list[Server] = []

    def capture(*arguments: Any, **more: Any) -> Server:
        servers.append(Server(*arguments, **more))
        return servers[-1]

    monkeypatch.setattr("rl_transferqueue.controller.controller.Server", capture)
    config = TransferQueueConfig(backend="memory", capacity_mb=8, segment_mb=1, listen="127.0.0.2", shared_memory=False)

    def no_descriptor(_: int) -> NoReturn:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def main(plane: LocalPlane) -> None:
        async with await connect(plane.descriptor) as client, await connect(plane.descriptor) as other:
            await client.put("p", ["a"], rows_of(1, MIB))
            waiting = asyncio.ensure_future(client.wait_ready("p", count=2, timeout_s=60))
            (server,) = servers

            with monkeypatch.context() as patch:
                if descriptors == "used up":
                    patch.setattr(os, "dup", no_descriptor)
                server._reactor.call_later(0, partial(server._on_end, client._route.session))
                await other.stats()
            with pytest.raises(PlaneLostError):
                await waiting
            assert (await other.metrics()).sessions == 1

    with start_local_plane(config) as plane:
        asyncio.run(main(plane))


# --------------------------------------------------------------------------------
# Bulk connections
@contextlib.contextmanager
def bulk(server: BulkServer) -> Iterator[BulkConnection]:
    unit = UnitAddress("", this_process(), -1, 0, bulk=f"127.0.0.1:{server.port}")
    connection = dial(unit, this_host(), "server", NO_KEY, os.urandom(8), 60)
    try:
        yield connection
    finally:
        connection.close()


def is_ended(connection: BulkConnection) -> None:
    connection.until(time.monotonic() + 60)
    with pytest.raises(PlaneLostError):
        connection.receive_bytes(1)


def test_memory_is_taken_for_what_came_and_not_for_what_was_announced() -> None:
    tracemalloc.start()
    try:
        with served(NO_KEY) as server, bulk(server) as connection:
            before, _ = tracemalloc.get_traced_memory()
            connection.send([(60 * MIB).to_bytes(4, "little"), bytes(1000)])
            (only,) = server._connections
            until(lambda: not only.idle, "the announcement has come")
            with bulk(server):
                assert tracemalloc.get_traced_memory()[1] < before + 4 * MIB
    finally:
        tracemalloc.stop()


def test_a_bulk_connection_that_stops_in_the_middle_of_a_request_is_ended_and_an_idle_one_stays(
    caplog: pytest.LogCaptureFixture,
) -> None:
    nothing = frame(ReadRows((), (WantedPiece(0, 0, ("x",), (0, 1)),)))
    with served(NO_KEY, SOON) as server, bulk(server) as half, bulk(server) as idle:
        idle.send([nothing])
        with pytest.raises(WireError):
            idle.expect(Sending)
        half.send([(60 * MIB).to_bytes(4, "little"), bytes(1000)])
        is_ended(half)
        until(lambda: len(server._connections) == 1, "the server has forgotten it")
        idle.send([nothing[:2]])
        is_ended(idle)
    assert "is ended in the middle of a transfer" in caplog.text


# --------------------------------------------------------------------------------
# No free file descriptors
def test_a_process_without_file_descriptors_does_not_try_in_a_loop(caplog: pytest.LogCaptureFixture) -> None:
    class Exhausted(socket.socket):
        tries = 0

        def accept(self) -> tuple[socket.socket, object]:
            Exhausted.tries += 1
            if Exhausted.tries < 3:
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    listening = Exhausted(socket.AF_INET)
    listening.bind(("127.0.0.1", 0))
    listening.listen(1)
    accepted: list[socket.socket] = []
    reactor = Reactor()

    def take(connection: socket.socket) -> None:
        accepted.append(connection)
        reactor.stop()

    listener = Listener(reactor, listening, take)
    with socket.create_connection(listening.getsockname()):
        reactor.call_later(60, reactor.stop)
        reactor.run()
    assert (len(accepted), Exhausted.tries) == (1, 3)
    accepted[0].close()
    listener.close()
    listener.close()
    assert caplog.text.count("Too many open files") == 2
