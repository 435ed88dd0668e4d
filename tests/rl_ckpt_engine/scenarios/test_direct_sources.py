"""Sources that write into shared memory: no copy, and the committed version stays intact."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import pytest
from ckpt_fakes import Sink

from rl_ckpt_engine import (
    CheckpointEngine,
    CheckpointEngineManager,
    Manifest,
    ReceiverEndpoint,
    SenderEndpoint,
    TensorSpec,
)
from rl_ckpt_engine.engines.base import memfd
from rl_ckpt_engine.engines.one_host.naive import NaiveEngine
from rl_ckpt_engine.engines.one_host.shm import ShmEngine
from rl_ckpt_engine.testing import assert_same, make_weights
from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.errors import WeightSyncError
from rl_protocol.ports import WeightCapabilities

SHAPES = [(300, 7), (), (0,), (33,)]
LAYOUT = [TensorSpec(f"w{number}", "float32", shape) for number, shape in enumerate(SHAPES)]
T = 120.0


class Trainer:
    """Writes weights that depend on the seed, or fails midway."""

    capabilities = WeightCapabilities(direct=True)

    def __init__(self) -> None:
        self.seed = 1
        self.breaks = False
        self.read = 0

    def named_weights(self) -> Iterable[WeightTensor]:
        self.read += 1
        return make_weights(SHAPES, seed=self.seed)

    def layout(self) -> Sequence[TensorSpec]:
        return LAYOUT

    def write_weights(self, room: Sequence[npt.NDArray[np.uint8]]) -> None:
        for data, weight in zip(room, make_weights(SHAPES, seed=self.seed), strict=True):
            data[:] = weight.data
            if self.breaks:
                raise WeightSyncError("the trainer broke")


def system(engine: type[CheckpointEngine]) -> tuple[Trainer, Sink, CheckpointEngineManager]:
    trainer, sink = Trainer(), Sink(make_weights(SHAPES))
    replica = ReceiverEndpoint(engine(), sink, name="r0")
    return trainer, sink, CheckpointEngineManager(SenderEndpoint(engine(), trainer), [replica])


def written(seed: int) -> dict[str, bytes]:
    return {w.name: w.data.tobytes() for w in make_weights(SHAPES, seed=seed)}


def refuse(*_: object) -> None:
    raise AssertionError("something was copied")


def test_a_source_that_writes_in_place_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, sink, manager = system(ShmEngine)
    monkeypatch.setattr(memfd.np, "copyto", refuse)
    for version in (1, 2, 3):
        trainer.seed = version
        asyncio.run(manager.update_weights(version))
        assert sink.loaded == written(version)
    assert trainer.read == 0


def test_an_engine_without_room_reads_the_tensors() -> None:
    trainer, sink, manager = system(NaiveEngine)
    asyncio.run(manager.update_weights(1))
    assert (sink.loaded, trainer.read) == (written(1), 1)


def test_a_source_that_fails_midway_has_no_side_effects() -> None:
    trainer, sink, manager = system(ShmEngine)
    asyncio.run(manager.update_weights(1))
    trainer.seed, trainer.breaks = 2, True
    with pytest.raises(WeightSyncError, match="the trainer broke"):
        asyncio.run(manager.update_weights(2))
    late = Sink(make_weights(SHAPES))
    asyncio.run(manager.add_receiver(ReceiverEndpoint(ShmEngine(), late, name="late")))
    assert late.loaded == sink.loaded == written(1)
    trainer.breaks = False
    asyncio.run(manager.update_weights(3))
    assert late.loaded == sink.loaded == written(2)


def pair() -> tuple[ShmEngine, ShmEngine]:
    sender, receiver = ShmEngine(), ShmEngine()
    receiver.init_process_group(ShmEngine.build_topology(sender.prepare(), [receiver.prepare()]).receivers[0])
    return sender, receiver


def filled(sender: ShmEngine, seed: int) -> tuple[list[WeightTensor], list[npt.NDArray[np.uint8]]]:
    room = sender.room(LAYOUT)
    for data, weight in zip(room, make_weights(SHAPES, seed=seed), strict=True):
        data[:] = weight.data
    return [WeightTensor(*spec, data) for spec, data in zip(LAYOUT, room, strict=True)], room


def send(sender: ShmEngine, weights: Sequence[WeightTensor], version: int) -> Manifest:
    return asyncio.run(sender.send_weights(weights, version, timeout_s=T))


def test_the_committed_version_is_whole_while_the_next_is_written() -> None:
    sender, receiver = pair()
    manifest = send(sender, filled(sender, 1)[0], 1)
    sender.finalize(1)
    filled(sender, 2)
    assert_same(asyncio.run(receiver.receive_weights(manifest, timeout_s=T)), make_weights(SHAPES, seed=1))


def test_the_room_is_read_only_once_it_was_sent() -> None:
    sender, receiver = pair()
    for version in (1, 2, 3, 4):
        _, given_up = filled(sender, 9)
        weights, room = filled(sender, version)
        manifest = send(sender, weights, version)
        for array in (*room, *given_up):
            with pytest.raises(ValueError, match="read-only"):
                array[:] = 1
        assert_same(asyncio.run(receiver.receive_weights(manifest, timeout_s=T)), make_weights(SHAPES, seed=version))
        sender.finalize(version)
    assert_same(asyncio.run(receiver.receive_weights(manifest, timeout_s=T)), make_weights(SHAPES, seed=4))


def test_there_is_no_room_while_receivers_may_be_reading() -> None:
    sender, receiver = pair()
    manifest = send(sender, filled(sender, 1)[0], 1)
    with pytest.raises(WeightSyncError, match=r"no memory for another version.*version 1"):
        sender.room(LAYOUT)
    asyncio.run(receiver.receive_weights(manifest, timeout_s=T))
    sender.abort()
    weights, _ = filled(sender, 2)
    with pytest.raises(WeightSyncError, match="no longer available"):
        receiver.confirm(manifest)
    assert_same(
        asyncio.run(receiver.receive_weights(send(sender, weights, 1), timeout_s=T)), make_weights(SHAPES, seed=2)
    )


def test_tensors_in_each_others_places_are_refused_before_they_are_overwritten() -> None:
    sender, _ = pair()
    weights, _ = filled(sender, 1)
    with pytest.raises(WeightSyncError, match=r"'w3' is in the memory of this version.*offset of another"):
        send(sender, weights[::-1], 1)
    assert_same(weights, make_weights(SHAPES, seed=1))


def test_no_memory_left_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(memfd, "allocate", full)
    with pytest.raises(WeightSyncError, match=r"no memory for 4 tensors.*No space left"):
        ShmEngine().room(LAYOUT)
