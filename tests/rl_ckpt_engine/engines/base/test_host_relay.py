"""A version that a receiver relays: other receivers copy it, or receive it from the sender."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import msgspec
import pytest
from ckpt_pair import WEIGHTS, T

from rl_ckpt_engine import Manifest
from rl_ckpt_engine.engines.base import host_relay
from rl_ckpt_engine.engines.network.tcp import TcpEngine
from rl_ckpt_engine.testing import assert_same, make_weights, refusal


class Members:
    """A sender, the receiver that relays, and another receiver."""

    def __init__(self) -> None:
        self.sender, self.leader, self.other = TcpEngine(), TcpEngine(), TcpEngine()
        for receiver in (self.leader, self.other):
            receiver.init_process_group(self.sender.prepare())

    def relayed(self, version: int = 1) -> Manifest:
        """The manifest of a version that the sender sent and the leader relays."""
        manifest = asyncio.run(self.sender.send_weights(self.weights(version), version, timeout_s=T))
        asyncio.run(self.leader.receive_weights(manifest, timeout_s=T))
        return asyncio.run(self.leader.relay(timeout_s=T))

    def received(self, manifest: Manifest) -> bool:
        """Let the other receive; returns whether it copied the version from the leader."""
        got = asyncio.run(self.other.receive_weights(manifest, timeout_s=T))
        assert_same(got, self.weights(manifest.version))
        return self.other.relayed

    @staticmethod
    def weights(version: int):
        return WEIGHTS if version == 1 else make_weights([w.shape for w in WEIGHTS], seed=version)


@pytest.fixture
def members() -> Iterator[Members]:
    made = Members()
    yield made
    for engine in (made.sender, made.leader, made.other):
        engine.close()


def test_the_sender_is_not_asked_for_a_relayed_version(members: Members) -> None:
    relayed = members.relayed()
    members.sender.close()
    assert members.received(relayed)


def test_the_received_tensors_stay_when_the_leader_relays_the_next_version(members: Members) -> None:
    first = asyncio.run(members.other.receive_weights(members.relayed(1), timeout_s=T))
    members.sender.finalize(1)
    members.relayed(2)
    assert_same(first, WEIGHTS)


def test_the_memory_of_a_former_leader_is_not_kept(members: Members) -> None:
    assert members.received(members.relayed(1))
    members.sender.finalize(1)
    held = members.other._relay._memory._mappings
    assert len(held) == 1
    members.leader.close()
    members.leader = TcpEngine()
    members.leader.init_process_group(members.sender.prepare())
    relayed = members.relayed(2)
    placement = host_relay._decoder.decode(relayed.placement.removeprefix(b"relay\0"))
    elsewhere = host_relay.ShmMember(host=host_relay.this_host(), pid=1 << 30)
    moved = host_relay._Placement(member=msgspec.msgpack.encode(elsewhere), slot=placement.slot)
    gone = msgspec.structs.replace(relayed, placement=b"relay\0" + msgspec.msgpack.encode(moved), digest=b"").sealed()
    assert not members.received(gone)
    assert not held


def test_without_the_leader_a_version_comes_from_the_sender(members: Members, caplog: pytest.LogCaptureFixture) -> None:
    relayed = members.relayed()
    members.leader.close()
    with caplog.at_level(logging.WARNING):
        assert not members.received(relayed)
    assert "received from the sender" in caplog.text


def test_a_leader_on_another_host_is_not_read(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    relayed = members.relayed()
    monkeypatch.setattr(host_relay, "this_host", lambda: "elsewhere")
    assert not members.received(relayed)


def test_an_overwritten_relay_is_noticed(members: Members) -> None:
    relayed = members.relayed(1)
    members.sender.finalize(1)
    members.relayed(2)
    assert "Version 1 is no longer available" in refusal(
        members.other._relay.copy(relayed, members.other._buffers.current.reserve(relayed.payload_nbytes), deadline())
    )


def test_damaged_bytes_are_noticed_and_received_from_the_sender(members: Members) -> None:
    relayed = members.relayed()
    slot = members.leader._relay._slot
    assert slot is not None
    slot._bytes.flags.writeable = True
    for entry in relayed.tensors:
        if entry.nbytes:
            payload = slot.payload(entry.offset, entry.nbytes)
            assert payload is not None
            payload[0] ^= 1
    assert not members.received(relayed)


def test_changed_weights_are_not_relayed(members: Members) -> None:
    members.relayed()
    members.leader._buffers.current.memory[0] ^= 1
    assert "changed while they were copied" in refusal(members.leader.relay(timeout_s=T))


@pytest.mark.parametrize("placement", [b"relay\0", b"relay\0\x82\xa6member"])
def test_an_unreadable_placement_is_not_trusted(members: Members, placement: bytes) -> None:
    relayed = msgspec.structs.replace(members.relayed(), placement=placement, digest=b"").sealed()
    assert not members.received(relayed)


def deadline() -> host_relay.Deadline:
    return host_relay.Deadline(T, "test", "test")
