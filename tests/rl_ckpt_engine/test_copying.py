"""Engines whose receivers copy: every fault is caught, a sync that broke off goes on, keys and files are what they must be."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from rl_ckpt_engine import CheckpointEngineConfig, CheckpointEngineManager, Manifest, ReceiverEndpoint, SenderEndpoint
from rl_ckpt_engine.engines.copying import CopyingEngine
from rl_ckpt_engine.engines.disk import DiskEngine, latest
from rl_ckpt_engine.engines.memfd import PAYLOAD_START
from rl_ckpt_engine.engines.safetensor_files import FolderPlacement
from rl_ckpt_engine.engines.tcp import TcpEngine, TcpMember
from rl_ckpt_engine.keys import KEY, KEY_FILE, load_key
from rl_ckpt_engine.staging import Bucket, Staging
from rl_ckpt_engine.stream import Deadline, emit
from rl_ckpt_engine.testing import assert_same, make_weights, refusal
from rl_protocol.errors import ConfigError, WeightSyncError
from rl_protocol.weights import WeightTensor

T = 20.0
ENGINES = ["tcp", "disk"]
WEIGHTS = make_weights([(300, 100), (), (0,), (100, 300), (7,)], seed=1)


class Pair:
    """Sender and receiver of one engine, and a way to the sender's bytes."""

    def __init__(self, engine: str, directory: Path) -> None:
        config = CheckpointEngineConfig(directory=str(directory), bucket_mb=64 / 1024)
        make = {"tcp": TcpEngine, "disk": DiskEngine}[engine]
        self.sender, self.receiver = make(config), make(config)
        self.directory = directory
        self.receiver.init_process_group(
            make.build_topology(self.sender.prepare(), [self.receiver.prepare()]).receivers[0]
        )

    def send(self, weights: list[WeightTensor] = WEIGHTS, version: int = 1) -> Manifest:
        return asyncio.run(self.sender.send_weights(weights, version, timeout_s=T))

    def receive(self, manifest: Manifest) -> list[WeightTensor]:
        return asyncio.run(self.receiver.receive_weights(manifest, timeout_s=T))

    def tamper(self, manifest: Manifest, change: Callable[[bytearray], None]) -> None:
        """Change the bytes of the first and the fourth tensor, as they lie at the sender."""
        for entry in (manifest.tensors[0], manifest.tensors[3]):
            fd, at = self.place(manifest, entry.name)
            data = bytearray(os.pread(fd, entry.nbytes, at))
            change(data)
            os.pwrite(fd, data, at)
            if isinstance(self.sender, DiskEngine):
                os.close(fd)

    def place(self, manifest: Manifest, name: str) -> tuple[int, int]:
        index = [e.name for e in manifest.tensors].index(name)
        if isinstance(self.sender, TcpEngine):
            held = self.sender._ledger.find(manifest.sync_id).held
            return held.fd, PAYLOAD_START + manifest.tensors[index].offset
        where = msgspec.msgpack.decode(manifest.placement)
        number, at = where["places"][index]
        return os.open(self.directory / where["folder"] / where["files"][number], os.O_RDWR), at

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


@pytest.fixture(params=ENGINES)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    made = Pair(request.param, tmp_path)
    yield made
    made.close()


def flip(data: bytearray) -> None:
    data[len(data) // 2] ^= 1


def drop_a_bucket(data: bytearray) -> None:
    data[: 64 << 10] = bytes(64 << 10)


def repeat_a_bucket(data: bytearray) -> None:
    data[40_000:80_000] = data[:40_000]


def reorder(data: bytearray) -> None:
    data[:40_000], data[40_000:80_000] = data[40_000:80_000], data[:40_000]


@pytest.mark.parametrize("fault", [flip, drop_a_bucket, repeat_a_bucket, reorder])
def test_changed_bytes_are_named_and_a_clean_sync_follows(pair: Pair, fault: Callable[[bytearray], None]) -> None:
    manifest = pair.send()
    pair.tamper(manifest, fault)
    assert "'w0' of version 1 arrived damaged" in refusal(lambda: pair.receive(manifest))
    assert "was not received" in refusal(lambda: pair.receiver.confirm(manifest))
    pair.sender.abort()
    assert_same(pair.receive(pair.send()), WEIGHTS)


def test_two_neighbours_keep_every_byte(pair: Pair) -> None:
    """No mark of any engine lies within the payload: neither first nor last bytes, at the edges of buckets neither."""
    for size in (1, 63, 64, 65, 65_535, 65_536, 65_537, 131_072):
        weights = make_weights([(size,), (size,), (1,)], dtype="uint8", seed=size)
        assert_same(pair.receive(pair.send(weights)), weights)
        pair.sender.abort()


def test_a_sync_that_broke_off_goes_on_where_it_stopped(pair: Pair) -> None:
    manifest = pair.send()
    broken = WeightTensor("w3", "float32", (100, 300), np.zeros(120_000, np.uint8))
    wrong = [*WEIGHTS[:3], broken, WEIGHTS[4]]
    pair.sender.abort()
    manifest = pair.send(wrong)
    entry = manifest.tensors[3]
    fd, at = pair.place(manifest, "w3")
    os.pwrite(fd, WEIGHTS[3].data, at)  # what the receiver gets is not what the manifest says
    assert "'w3'" in refusal(lambda: pair.receive(manifest))
    os.pwrite(fd, broken.data, at)
    assert_same(pair.receive(manifest), wrong)
    assert pair.receiver.pulled_nbytes <= entry.nbytes + 64 + WEIGHTS[4].nbytes, "w0, w1 and w2 were there"
    if isinstance(pair.sender, DiskEngine):
        os.close(fd)


def test_what_did_not_change_is_not_sent_again_and_still_verified(pair: Pair) -> None:
    pair.receive(pair.send())
    pair.sender.finalize(1)
    changed = make_weights([(300, 100), (), (0,), (100, 300), (7,)], seed=2)
    mixed = [WEIGHTS[0], *changed[1:3], WEIGHTS[3], changed[4]]
    got = pair.receive(pair.send(mixed, 2))
    assert_same(got, mixed)
    assert pair.receiver.pulled_nbytes == 4 + 28
    pair.sender.finalize(2)
    held = pair.receiver._staging._memory
    held[5] ^= 1  # a bit of the receiver's memory flips between two syncs
    assert_same(pair.receive(pair.send(mixed, 3)), mixed)
    assert pair.receiver.pulled_nbytes == WEIGHTS[0].nbytes


def test_a_sender_that_dies_midway_is_an_error_and_its_successor_goes_on(tmp_path: Path) -> None:
    first = Pair("tcp", tmp_path)
    manifest = first.send()
    taken = 0

    class Dying(TcpEngine):
        async def _pull(self, manifest, buckets, deadline):
            nonlocal taken
            async for _ in super()._pull(manifest, buckets, deadline):
                yield
                taken += 1
                if taken == 2:
                    first.sender.close()

    receiver = Dying(CheckpointEngineConfig(bucket_mb=64 / 1024))
    receiver.init_process_group(first.sender.prepare())
    assert "sender died or closed" in refusal(receiver.receive_weights(manifest, timeout_s=T))
    second = Pair("tcp", tmp_path)
    again = second.send()
    receiver.init_process_group(second.sender.prepare())
    assert_same(asyncio.run(receiver.receive_weights(again, timeout_s=T)), WEIGHTS)
    assert receiver.pulled_nbytes < 130_000 < sum(w.nbytes for w in WEIGHTS)
    for engine in (first, second, receiver):
        engine.close()


# ------------------------------------------------------------------------------------------------------------------- tcp


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


@pytest.mark.parametrize(("theirs", "message"), [("b" * 32, "another key"), ("", "another key")])
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
    sender, receiver = TcpEngine(), TcpEngine(CheckpointEngineConfig(listen="192.0.2.77"))  # an address of no host
    topology = TcpEngine.build_topology(sender.prepare(), [receiver.prepare()])
    receiver.init_process_group(topology.receivers[0])
    manifest = asyncio.run(sender.send_weights(WEIGHTS, 1, timeout_s=T))
    assert_same(asyncio.run(receiver.receive_weights(manifest, timeout_s=T)), WEIGHTS)
    assert "no address of this host" in refusal(receiver.send_weights(WEIGHTS, 1, timeout_s=T))
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


# ------------------------------------------------------------------------------------------------------------------ disk


def test_a_version_on_disk_is_a_checkpoint_that_others_can_read(tmp_path: Path) -> None:
    pair = Pair("disk", tmp_path)
    pair.send()
    assert latest(tmp_path) is None, "not before it is committed"
    pair.sender.finalize(1)
    manifest = latest(tmp_path)
    assert manifest is not None
    assert manifest.version == 1
    (folder,) = tmp_path.glob("v000000000001-*")
    arrays = load_file(folder / "model-00001.safetensors")
    assert {name: a.tobytes() for name, a in arrays.items()} == {w.name: w.data.tobytes() for w in WEIGHTS}
    assert {name: a.shape for name, a in arrays.items()} == {w.name: w.shape for w in WEIGHTS}
    index = msgspec.json.decode((folder / "model.safetensors.index.json").read_bytes())
    assert index["weight_map"] == dict.fromkeys(arrays, "model-00001.safetensors")
    pair.close()
    joiner = DiskEngine(CheckpointEngineConfig(directory=str(tmp_path)))
    joiner.init_process_group(manifest.sender)
    assert_same(asyncio.run(joiner.receive_weights(manifest, timeout_s=T)), WEIGHTS)
    joiner.close()


def test_the_directory_holds_two_versions_at_most_and_no_leftovers(tmp_path: Path) -> None:
    (tmp_path / ".v000000000009-dead.tmp").mkdir()
    pair = Pair("disk", tmp_path)
    for version in (1, 2, 3):
        manifest = pair.send(version=version)
        assert len(list(tmp_path.glob("v*"))) == min(version, 2)
        pair.receive(manifest)
        pair.sender.finalize(version)
    assert [path.name[:13] for path in tmp_path.iterdir() if path.is_dir()] == ["v000000000003"]
    pair.send(version=4)
    pair.sender.abort()
    assert [path.name[:13] for path in tmp_path.iterdir() if path.is_dir()] == ["v000000000003"]
    pair.close()


def test_a_file_cut_short_is_an_error_and_kills_nobody(tmp_path: Path) -> None:
    pair = Pair("disk", tmp_path)
    manifest = pair.send()
    (file,) = tmp_path.glob("v*/*.safetensors")
    os.truncate(file, file.stat().st_size - 1000)
    assert "cut short" in refusal(lambda: pair.receive(manifest))
    pair.close()


def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    pair = Pair("disk", tmp_path)
    manifest = pair.send()
    (file,) = tmp_path.glob("v*/*.safetensors")
    file.unlink()
    os.mkfifo(file)
    assert "is no file" in refusal(lambda: pair.receive(manifest))
    pair.close()


def test_places_beyond_any_file_and_files_of_other_folders_are_refused(tmp_path: Path) -> None:
    pair = Pair("disk", tmp_path)
    manifest = pair.send()
    place = msgspec.msgpack.decode(manifest.placement, type=FolderPlacement)
    (tmp_path.parent / "outside.safetensors").write_bytes(bytes(200_000))
    changes = ({"places": tuple((n, 1 << 63) for n, _ in place.places)}, {"files": ("../../outside.safetensors",)})
    for change, why in zip(changes, ("does not fit", "not there any more"), strict=True):
        placement = msgspec.msgpack.encode(msgspec.structs.replace(place, **change))
        forged = msgspec.structs.replace(manifest, placement=placement).sealed()
        assert why in refusal(lambda manifest=forged: pair.receive(manifest))
    pair.close()


def test_many_tensors_take_several_files(tmp_path: Path) -> None:
    pair = Pair("disk", tmp_path)
    many = make_weights([(1,)] * 1500)
    long = [WeightTensor(f"{w.name}{'.layer' * 20}", w.dtype, w.shape, w.data) for w in many]
    manifest = pair.send(long)
    assert len(list(tmp_path.glob("v*/*.safetensors"))) > 1
    assert_same(pair.receive(manifest), long)
    pair.sender.abort()
    name = "x" * 70_000
    assert "too long" in refusal(lambda: pair.send([WeightTensor(name, "uint8", (0,), np.empty(0, np.uint8))]))
    pair.close()


def test_disk_says_what_to_set() -> None:
    with pytest.raises(ConfigError, match=r"set checkpoint_engine\.directory"):
        DiskEngine()


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    pair = Pair("disk", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert "No space left on device" in refusal(lambda: pair.send())
    assert not list(tmp_path.iterdir())
    assert_same(pair.receive(pair.send()), WEIGHTS)
    pair.close()


# --------------------------------------------------------------------------------------------------------------- staging


@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=12),
    bucket=st.integers(1, 400),
    stop=st.integers(0, 40),
)
@settings(max_examples=150, deadline=None)
def test_buckets_hold_every_missing_byte_once_and_what_was_verified_stays(
    sizes: list[int], bucket: int, stop: int
) -> None:
    weights = make_weights([(size,) for size in sizes], dtype="uint8", seed=len(sizes))

    class Memory:
        unordered = True

        def __init__(self) -> None:
            self.payload = bytearray(20_000)

        def start(self, weight: WeightTensor, offset: int) -> None: ...

        def write(self, offset: int, piece: memoryview) -> None:
            self.payload[offset : offset + len(piece)] = piece

    async def run() -> None:
        memory = Memory()
        entries = await emit(weights, memory, Deadline(T, "Sending", "x"))
        manifest = Manifest(
            version=1,
            sync_id=bytes(16),
            engine="x",
            tensors=entries,
            payload_nbytes=max(e.end for e in entries),
            sender=b"",
            placement=b"",
        ).sealed()
        staging = Staging(bucket)
        moved = 0

        async def pull(buckets: list[Bucket], limit: int):
            nonlocal moved
            covered = [range(b.start, b.start + b.memory.nbytes) for b in buckets]
            assert all(one.stop <= two.start for one, two in pairwise(covered))
            for b in buckets:
                assert b.memory.nbytes <= bucket
                if limit == 0:
                    raise WeightSyncError("broke off")
                limit -= 1
                b.memory[:] = memory.payload[b.start : b.start + b.memory.nbytes]
                moved += b.memory.nbytes
                yield

        try:
            await staging.fill(manifest, lambda buckets: pull(buckets, stop), Deadline(T, "Receiving", "x"))
        except WeightSyncError:
            kept = sum(e.nbytes for e in staging._held.values())
            before, moved = moved, 0
            assert kept <= before
            got = await staging.fill(manifest, lambda buckets: pull(buckets, -1), Deadline(T, "Receiving", "x"))
            assert moved <= manifest.payload_nbytes - kept
            assert_same(got, weights)
        else:
            assert manifest.tensor_nbytes <= moved <= manifest.payload_nbytes

    asyncio.run(run())


def test_hundred_syncs_leave_nothing_behind(pair: Pair) -> None:
    from ckpt_fakes import Sink, Source

    def resources() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), len(Path("/proc/self/maps").read_text().splitlines())

    source = Source(WEIGHTS)
    sink = Sink(WEIGHTS)
    assert isinstance(pair.sender, CopyingEngine)

    async def run() -> None:
        manager = CheckpointEngineManager(
            SenderEndpoint(pair.sender, source), [ReceiverEndpoint(pair.receiver, sink, name="r")]
        )
        for version in range(100):
            source.weights = make_weights([(300, 100), (), (0,), (100, 300), (7,)], seed=version)
            await manager.update_weights(version)
            if version == 10:
                before = resources()
        after = resources()
        assert after[0] <= before[0]
        assert after[1] <= before[1] + 4

    asyncio.run(run())
    assert sink.loaded == {w.name: w.data.tobytes() for w in source.weights}
