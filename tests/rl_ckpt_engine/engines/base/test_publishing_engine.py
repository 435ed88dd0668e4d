"""PublishingEngine, through `tcp` and `disk`: damage is detected, and a failed sync resumes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from ckpt_pair import ENGINES, WEIGHTS, Pair, T

from rl_ckpt_engine import CheckpointEngineConfig, CheckpointEngineManager, ReceiverEndpoint, SenderEndpoint
from rl_ckpt_engine.engines.base.publishing_engine import PublishingEngine
from rl_ckpt_engine.engines.network.tcp import TcpEngine
from rl_ckpt_engine.engines.storage.disk import DiskEngine
from rl_ckpt_engine.testing import assert_same, make_weights, refusal
from rl_protocol.batch.weight_tensor import WeightTensor


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
    """No engine writes markers into the payload, not even at bucket boundaries."""
    for size in (1, 63, 64, 65, 65_535, 65_536, 65_537, 131_072):
        weights = make_weights([(size,), (size,), (1,)], dtype="uint8", seed=size)
        assert_same(pair.receive(pair.send(weights)), weights)
        pair.sender.abort()


def test_an_interrupted_sync_resumes_where_it_stopped(pair: Pair) -> None:
    manifest = pair.send()
    broken = WeightTensor("w3", "float32", (100, 300), np.zeros(120_000, np.uint8))
    wrong = [*WEIGHTS[:3], broken, WEIGHTS[4]]
    pair.sender.abort()
    manifest = pair.send(wrong)
    entry = manifest.tensors[3]
    fd, at = pair.place(manifest, "w3")
    os.pwrite(fd, WEIGHTS[3].data, at)  # the receiver gets other bytes than the manifest describes
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
    held = pair.receiver._buffers.current._memory
    held[5] ^= 1  # flip a bit of the receiver's memory between two syncs
    assert_same(pair.receive(pair.send(mixed, 3)), mixed)
    assert pair.receiver.pulled_nbytes == WEIGHTS[0].nbytes


def test_a_sender_that_dies_midway_is_an_error_and_its_successor_resumes(tmp_path: Path) -> None:
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


def test_hundred_syncs_leave_nothing_behind(pair: Pair) -> None:
    from ckpt_fakes import Sink, Source

    def resources() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), len(Path("/proc/self/maps").read_text().splitlines())

    source = Source(WEIGHTS)
    sink = Sink(WEIGHTS)
    assert isinstance(pair.sender, PublishingEngine)

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
