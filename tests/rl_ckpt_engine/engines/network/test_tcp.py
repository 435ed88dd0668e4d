"""Engine `tcp`: keys, unknown clients, deadlines."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import selectors
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from ckpt_pair import WEIGHTS, T

from rl_ckpt_engine import CheckpointEngineConfig
from rl_ckpt_engine.engines.network import tcp_server, tcp_transport
from rl_ckpt_engine.engines.network.tcp import TcpEngine
from rl_ckpt_engine.engines.network.tcp_secret import KEY, KEY_FILE, load_key
from rl_ckpt_engine.engines.network.tcp_server import Bytes
from rl_ckpt_engine.engines.network.tcp_transport import TcpMember
from rl_ckpt_engine.testing import assert_same, refusal
from rl_protocol.errors import ConfigError, WeightSyncError


def test_a_sender_that_stops_answering_is_a_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        member = msgspec.msgpack.encode(
            TcpMember(host="127.0.0.1", port=mute.getsockname()[1], token=bytes(16), node="here")
        )
        receiver, sender = TcpEngine(), TcpEngine()
        manifest = asyncio.run(sender.send_weights(WEIGHTS, 1, timeout_s=T))
        receiver.init_process_group(member)
        forged = msgspec.structs.replace(manifest, sender=member).sealed()
        message = refusal(receiver.receive_weights(forged, timeout_s=0.2))
        assert "Receiving version 1" in message
        assert "did not finish within 0.2 s" in message
        sender.close()
        receiver.close()


def test_other_hosts_need_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY, raising=False)
    monkeypatch.delenv(KEY_FILE, raising=False)
    with pytest.raises(ConfigError, match="needs a key: set RL_CKPT_KEY_FILE"):
        TcpEngine(CheckpointEngineConfig(listen="10.1.2.3"))
    with pytest.raises(ConfigError, match="name one address"):
        TcpEngine(CheckpointEngineConfig(listen="0.0.0.0"))
    with pytest.raises(ConfigError, match="IP address"):
        TcpEngine(CheckpointEngineConfig(listen="somewhere"))
    monkeypatch.setenv(KEY, "k" * 32)
    TcpEngine(CheckpointEngineConfig(listen="10.1.2.3")).close()


@pytest.mark.parametrize(("theirs", "message"), [("b" * 32, "a different key"), ("", "a different key")])
def test_who_does_not_know_the_key_gets_nothing(theirs: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "a" * 32)
    sender = TcpEngine()
    same = TcpEngine()
    monkeypatch.setenv(KEY, theirs)
    other = TcpEngine()
    manifest = asyncio.run(sender.send_weights(WEIGHTS, 1, timeout_s=T))
    for engine in (same, other):
        engine.init_process_group(sender.prepare())
    assert_same(asyncio.run(same.receive_weights(manifest, timeout_s=T)), WEIGHTS)
    assert message in refusal(other.receive_weights(manifest, timeout_s=T))
    for engine in (sender, same, other):
        engine.close()


def test_a_receiver_elsewhere_has_the_settings_of_the_sender_and_need_not_listen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(KEY, "k" * 32)
    # an address that no host has
    sender, receiver = TcpEngine(), TcpEngine(CheckpointEngineConfig(listen="192.0.2.77"))
    topology = TcpEngine.build_topology(sender.prepare(), [receiver.prepare()])
    receiver.init_process_group(topology.receivers[0])
    manifest = asyncio.run(sender.send_weights(WEIGHTS, 1, timeout_s=T))
    assert_same(asyncio.run(receiver.receive_weights(manifest, timeout_s=T)), WEIGHTS)
    assert "not an address of this host" in refusal(receiver.send_weights(WEIGHTS, 1, timeout_s=T))
    sender.close()
    receiver.close()


def test_another_process_behind_the_port_is_noticed() -> None:
    sender, impostor, receiver = TcpEngine(), TcpEngine(), TcpEngine()
    manifest = asyncio.run(sender.send_weights(WEIGHTS, 1, timeout_s=T))
    port = msgspec.msgpack.decode(impostor.prepare(), type=TcpMember).port
    member = msgspec.structs.replace(msgspec.msgpack.decode(manifest.sender, type=TcpMember), port=port)
    forged = msgspec.structs.replace(manifest, sender=msgspec.msgpack.encode(member)).sealed()
    receiver.init_process_group(forged.sender)
    assert "another process" in refusal(receiver.receive_weights(forged, timeout_s=T))
    for engine in (sender, impostor, receiver):
        engine.close()


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n" * 10, bytes(64)])
def test_strangers_cost_the_sender_nothing(said: bytes) -> None:
    sender, receiver = TcpEngine(), TcpEngine()
    manifest = asyncio.run(sender.send_weights(WEIGHTS, 1, timeout_s=T))
    with socket.create_connection(
        ("127.0.0.1", msgspec.msgpack.decode(manifest.sender, type=TcpMember).port)
    ) as stranger:
        stranger.sendall(said)
        receiver.init_process_group(sender.prepare())
        assert_same(asyncio.run(receiver.receive_weights(manifest, timeout_s=T)), WEIGHTS)
    sender.close()
    receiver.close()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ECONNABORTED])
def test_a_sender_still_listens_after_an_error_of_accept(
    number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accept, failures = socket.socket.accept, [OSError(number, os.strerror(number))]

    def fail_once(listener: socket.socket) -> tuple[socket.socket, object]:
        if failures:
            raise failures.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", fail_once)
    sender, receiver = TcpEngine(), TcpEngine()
    manifest = asyncio.run(sender.send_weights(WEIGHTS, 1, timeout_s=T))
    receiver.init_process_group(sender.prepare())
    assert_same(asyncio.run(receiver.receive_weights(manifest, timeout_s=T)), WEIGHTS)
    assert f"[Errno {number}]" in caplog.text
    sender.close()
    receiver.close()


def test_a_sender_still_listens_after_a_thread_that_could_not_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start, failures = threading.Thread.start, ["can't start new thread"]

    def fail_once(thread: threading.Thread) -> None:
        if thread.name == "rl-ckpt-tcp-peer" and failures:
            raise RuntimeError(failures.pop())
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail_once)
    sender, receiver = TcpEngine(), TcpEngine()
    manifest = asyncio.run(sender.send_weights(WEIGHTS, 1, timeout_s=T))
    port = msgspec.msgpack.decode(sender.prepare(), type=TcpMember).port
    with socket.create_connection(("127.0.0.1", port), timeout=T) as refused:
        assert refused.recv(1) == b"", "the connection is closed, so that the receiver can try again"
    receiver.init_process_group(sender.prepare())
    assert_same(asyncio.run(receiver.receive_weights(manifest, timeout_s=T)), WEIGHTS)
    assert "can't start new thread" in caplog.text
    sender.close()
    receiver.close()


def test_a_slow_handshake_is_cut_off_although_it_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_server, "HANDSHAKE_S", 0.4)
    sender = TcpEngine()
    port = msgspec.msgpack.decode(sender.prepare(), type=TcpMember).port
    with socket.create_connection(("127.0.0.1", port), timeout=T) as stranger:
        stranger.recv(36, socket.MSG_WAITALL)  # the greeting
        for _ in range(63):  # the answer needs 64 bytes
            stranger.send(b"x")
            if select.select([stranger], [], [], 0.1)[0]:
                break
        else:
            pytest.fail("the sender has waited for the whole answer")
    sender.close()


def test_key_file_must_be_private_and_long(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("s" * 40 + "\n")
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="others may read"):
        load_key({KEY_FILE: str(file)})
    file.chmod(0o600)
    assert load_key({KEY_FILE: str(file)}).proof(b"x") == load_key({KEY: "s" * 40}).proof(b"x")
    assert "s" * 5 not in repr(load_key({KEY: "s" * 40}))
    with pytest.raises(ConfigError, match="has 5 characters"):
        load_key({KEY: "short"})
    with pytest.raises(ConfigError, match="Both"):
        load_key({KEY: "s" * 40, KEY_FILE: str(file)})
    assert not load_key({})


def test_a_receiver_that_reads_nothing_for_a_while_stays_connected() -> None:
    """With this option, Linux ends a connection that could not deliver anything for that time."""
    sender = TcpEngine()
    member = msgspec.msgpack.decode(sender.prepare(), type=TcpMember)
    with socket.create_connection(("127.0.0.1", member.port)) as receiver:
        receiver.settimeout(T)
        assert receiver.recv(4) == tcp_server.MAGIC  # its options are set by then
        (peer,) = sender._transport._server._peers
        assert peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
        assert peer.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    sender.close()


class StuckSender:
    """Sends a part of a bucket, and nothing more until `gone` is set."""

    def __init__(self) -> None:
        self.gone = threading.Event()

    def deliver(self, peer: socket.socket, payload: Bytes) -> None:
        peer.sendall(payload.data[:1])
        self.gone.wait(T)

    def close(self) -> None:
        """Do nothing."""


def test_closing_a_receiver_ends_the_thread_that_waits_for_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection is closed before the thread waits, the worst case of a race."""
    stuck, waits, closed = StuckSender(), threading.Event(), threading.Event()

    class LateSelector(selectors.DefaultSelector):
        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            waits.set()
            closed.wait(T)
            return super().select(timeout)

    late = SimpleNamespace(DefaultSelector=LateSelector, EVENT_READ=selectors.EVENT_READ)
    monkeypatch.setattr(tcp_transport, "selectors", late)
    sender, receiver = TcpEngine(), TcpEngine()
    sender.prepare()
    monkeypatch.setattr(sender._transport._server, "_new_bucket_sender", lambda: stuck)

    async def close_during_receive() -> None:
        manifest = await sender.send_weights(WEIGHTS, 1, timeout_s=T)
        receiver.init_process_group(manifest.sender)
        receiving = asyncio.create_task(receiver.receive_weights(manifest, timeout_s=T))
        assert await asyncio.to_thread(waits.wait, T)
        receiver.close()
        closed.set()
        async with asyncio.timeout(T):
            with pytest.raises(WeightSyncError, match="broke"):
                await receiving

    asyncio.run(close_during_receive())
    stuck.gone.set()
    sender.close()
