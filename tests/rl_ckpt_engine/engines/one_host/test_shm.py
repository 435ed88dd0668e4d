"""Engine `shm` when its memory is damaged, overwritten, replaced or gone."""

from __future__ import annotations

import asyncio
import fcntl
import os
from pathlib import Path

import msgspec
import pytest

from rl_ckpt_engine import Manifest
from rl_ckpt_engine.engines.base import memfd
from rl_ckpt_engine.engines.base.memfd import PAYLOAD_START, SlotPlacement
from rl_ckpt_engine.engines.base.sender_memory import ShmMember
from rl_ckpt_engine.engines.one_host.shm import ShmEngine
from rl_ckpt_engine.testing import assert_same, make_weights
from rl_protocol.errors import WeightSyncError
from rl_protocol.support.fault_points import FaultPoint
from rl_protocol.support.host.portable import uses_linux

linux_only = pytest.mark.skipif(not uses_linux(), reason="only Linux has seals and memory without a name")


def sent(version: int = 1) -> tuple[ShmEngine, ShmEngine, Manifest]:
    sender, receiver = ShmEngine(), ShmEngine()
    receiver.init_process_group(ShmEngine.build_topology(sender.prepare(), [receiver.prepare()]).receivers[0])
    manifest = asyncio.run(sender.send_weights(make_weights([(100,), (30, 3)]), version, timeout_s=60))
    return sender, receiver, manifest


def placement(manifest: Manifest) -> SlotPlacement:
    return msgspec.msgpack.decode(manifest.placement, type=SlotPlacement)


def poke(sender: ShmEngine, at: int, data: bytes) -> None:
    """Write through the sender's own mapping, the only one that is still writable."""
    published = sender._sending.versions.pending
    assert published is not None
    memory = published.held._bytes
    memory.flags.writeable = True
    memory[at : at + len(data)] = list(data)
    memory.flags.writeable = False


def refused(receiver: ShmEngine, manifest: Manifest, message: str) -> None:
    with pytest.raises(WeightSyncError, match=message):
        asyncio.run(receiver.receive_weights(manifest, timeout_s=60))


def test_flipped_byte_names_the_tensor() -> None:
    sender, receiver, manifest = sent()
    at = PAYLOAD_START + manifest.tensors[1].offset + 5
    byte = os.pread(placement(manifest).fd, 1, at)[0]
    poke(sender, at, bytes([byte ^ 1]))
    refused(receiver, manifest, "'w1' of version 1 arrived damaged")


def test_a_byte_that_a_fault_point_changes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def flip(point: FaultPoint, memory: memoryview) -> None:
        assert (point, len(memory)) == (FaultPoint.WEIGHTS_SENT, 400)  # 100 float32
        memory[200] ^= 1

    with monkeypatch.context() as patch:
        patch.setattr(memfd, "reach", flip)
        _, receiver, manifest = sent()
    refused(receiver, manifest, "'w0' of version 1 arrived damaged")


def test_padding_is_not_part_of_any_tensor() -> None:
    sender, receiver, manifest = sent()
    poke(sender, PAYLOAD_START + manifest.tensors[0].nbytes, b"\xff")
    asyncio.run(receiver.receive_weights(manifest, timeout_s=60))


def test_header_of_a_write_in_progress_is_refused_before_and_after_reading() -> None:
    sender, receiver, manifest = sent()
    asyncio.run(receiver.receive_weights(manifest, timeout_s=60))
    poke(sender, 16, b"\x01")
    with pytest.raises(WeightSyncError, match="no longer available"):
        receiver.confirm(manifest)
    refused(receiver, manifest, "no longer available")
    with pytest.raises(WeightSyncError, match="was not received here"):
        receiver.confirm(manifest)


def test_overwriting_during_verification_is_noticed() -> None:
    """The receiver yields every 16 MiB; there the sender reuses the slot for another version."""
    sender, receiver = ShmEngine(), ShmEngine()
    receiver.init_process_group(ShmEngine.build_topology(sender.prepare(), [receiver.prepare()]).receivers[0])

    async def race() -> None:
        manifest = await sender.send_weights(make_weights([(5 << 20,)]), 1, timeout_s=60)
        receiving = asyncio.create_task(receiver.receive_weights(manifest, timeout_s=60))
        await asyncio.sleep(0)
        sender.abort()
        await receiving

    with pytest.raises(WeightSyncError, match="no longer available"):
        asyncio.run(race())


@linux_only
def test_memory_is_reused_and_has_no_name() -> None:
    sender, _, manifest = sent(1)
    seen = {placement(manifest)}
    sender.finalize(1)
    for version in range(2, 8):
        seen.add(placement(asyncio.run(sender.send_weights(make_weights([(100,)]), version, timeout_s=60))))
        sender.finalize(version)
    assert len(seen) == 2
    assert Path(f"/proc/self/fd/{placement(manifest).fd}").readlink().name.startswith("memfd:")


@linux_only
def test_memory_can_not_be_shrunk_under_a_reader() -> None:
    owner, _, manifest = sent()
    with pytest.raises(PermissionError):
        os.ftruncate(placement(manifest).fd, 0)
    owner.close()


def test_views_outlive_both_engines() -> None:
    sender, receiver, manifest = sent()
    weights = asyncio.run(receiver.receive_weights(manifest, timeout_s=60))
    sender.close()
    receiver.close()
    assert [w.data.tobytes() for w in weights] == [w.data.tobytes() for w in make_weights([(100,), (30, 3)])]


def resealed(manifest: Manifest, **changes: int) -> Manifest:
    place = msgspec.structs.replace(placement(manifest), **changes)
    return msgspec.structs.replace(manifest, placement=msgspec.msgpack.encode(place)).sealed()


def test_number_that_now_means_another_file_is_refused() -> None:
    _sender, receiver, manifest = sent()
    refused(receiver, resealed(manifest, inode=placement(manifest).inode + 10**6), "sender was replaced")


@linux_only
def test_file_that_is_no_memory_is_refused(tmp_path: Path) -> None:
    _sender, receiver, manifest = sent()
    plain = tmp_path / "plain"
    plain.write_bytes(bytes(10_000))
    with plain.open("rb") as file:
        inode = os.fstat(file.fileno()).st_ino
        refused(receiver, resealed(manifest, fd=file.fileno(), inode=inode), "sealed|can't be opened")


@linux_only
@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK], ids=["none", "may still be written"])
def test_unsealed_memory_is_refused(seals: int) -> None:
    _sender, receiver, manifest = sent()
    fd = os.memfd_create("other", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    try:
        refused(receiver, resealed(manifest, fd=fd, inode=os.fstat(fd).st_ino), "not sealed")
    finally:
        os.close(fd)


def test_short_memory_is_refused() -> None:
    _sender, receiver, manifest = sent()
    bigger = msgspec.structs.replace(manifest.tensors[0], shape=(2**30,), nbytes=2**32)
    whole = msgspec.structs.replace(manifest, tensors=(bigger,), payload_nbytes=2**32).sealed()
    refused(receiver, whole, "interrupted")


def test_hosts_and_containers_must_be_the_same() -> None:
    elsewhere = msgspec.msgpack.encode(ShmMember(host="other-boot/pid:[1]", pid=7))
    with pytest.raises(WeightSyncError, match="receiver process 7 on other-boot"):
        ShmEngine.build_topology(ShmEngine().prepare(), [elsewhere])


def test_no_memory_left_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    sender, receiver, manifest = sent()
    sender.abort()
    larger = make_weights([(4,), (5_000,), (60_000,)])
    with monkeypatch.context() as patch:
        patch.setattr(memfd, "allocate", full)
        with pytest.raises(WeightSyncError, match="No space left on device"):
            asyncio.run(sender.send_weights(larger, 1, timeout_s=60))
    for weights in (make_weights([(100,)]), larger, make_weights([(100,)])):
        manifest = asyncio.run(sender.send_weights(weights, 1, timeout_s=60))
        assert_same(asyncio.run(receiver.receive_weights(manifest, timeout_s=60)), weights)
        sender.abort()
