"""Conformance suite of checkpoint engines: subclass `EngineConformance` and return your engine.

    class TestMyEngine(EngineConformance):
        def make_engine(self) -> CheckpointEngine:
            return MyEngine()

Sender and receiver are two objects in one process; engines need their own tests between processes.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from rl_ckpt_engine.engines.contract import ENGINE_API_VERSION, CheckpointEngine, check_capabilities
from rl_ckpt_engine.payload.manifest import Manifest
from rl_protocol.batch.dtypes import STORAGE_DTYPES
from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.errors import WeightSyncError

_TIMEOUT_S = 120.0


def make_weights(shapes: Sequence[tuple[int, ...]], *, dtype: str = "float32", seed: int = 0) -> list[WeightTensor]:
    """Tensors `w0`, `w1`, ... of random bytes, including NaN and other bit patterns."""
    draw = np.random.default_rng(seed)
    itemsize = STORAGE_DTYPES[dtype].itemsize
    sizes = [itemsize * int(np.prod(shape, dtype=np.int64)) for shape in shapes]
    return [
        WeightTensor(f"w{i}", dtype, shape, np.frombuffer(draw.bytes(size), dtype=np.uint8))
        for i, (shape, size) in enumerate(zip(shapes, sizes, strict=True))
    ]


def assert_same(got: Sequence[WeightTensor], want: Sequence[WeightTensor]) -> None:
    """Assert equal names, element types, shapes and bytes, in the same order."""
    assert [(w.name, w.dtype, w.shape) for w in got] == [(w.name, w.dtype, w.shape) for w in want]
    for one, other in zip(got, want, strict=True):
        assert np.array_equal(one.data, other.data), f"the bytes of {one.name!r} differ"


def refusal(call: object) -> str:
    """Await or call `call`, which must raise WeightSyncError, and return its message."""
    try:
        if asyncio.iscoroutine(call):
            asyncio.run(call)
        elif callable(call):
            call()
    except WeightSyncError as error:
        return error.message
    raise AssertionError(f"{call!r} raised no WeightSyncError")


class EngineConformance:
    """Tests with one sender and one receiver of the engine, connected for each test."""

    @abstractmethod
    def make_engine(self) -> CheckpointEngine:
        """Create an engine."""

    def joined(self) -> tuple[CheckpointEngine, CheckpointEngine]:
        """A connected sender and receiver."""
        sender, receiver = self.make_engine(), self.make_engine()
        topology = type(sender).build_topology(sender.prepare(), [receiver.prepare()])
        sender.init_process_group(topology.sender)
        receiver.init_process_group(topology.receivers[0])
        asyncio.run(_join(sender, receiver))
        return sender, receiver

    async def receive(
        self, sender: CheckpointEngine, receiver: CheckpointEngine, manifest: Manifest, *, timeout_s: float = _TIMEOUT_S
    ) -> list[WeightTensor]:
        """Receive the manifest's weights; the sender of a group serves meanwhile."""
        if sender.capabilities.elastic:
            return await receiver.receive_weights(manifest, timeout_s=timeout_s)
        served, received = await asyncio.gather(
            sender.serve(manifest, timeout_s=timeout_s),
            receiver.receive_weights(manifest, timeout_s=timeout_s),
            return_exceptions=True,
        )
        for result in (served, received):
            if isinstance(result, BaseException):
                await self.regroup(sender, receiver)
                raise result
        assert isinstance(received, list)
        return received

    async def regroup(self, sender: CheckpointEngine, receiver: CheckpointEngine) -> None:
        """Form a new group of these members."""
        topology = type(sender).build_topology(sender.prepare(), [receiver.prepare()])
        sender.init_process_group(topology.sender)
        receiver.init_process_group(topology.receivers[0])
        await _join(sender, receiver)

    def another_receiver(self, sender: CheckpointEngine) -> CheckpointEngine:
        """A receiver that joins later."""
        receiver = self.make_engine()
        asyncio.run(self.regroup(sender, receiver))
        return receiver

    def send(self, sender: CheckpointEngine, weights: Sequence[WeightTensor], version: int) -> Manifest:
        """Send the weights; returns the manifest after encoding and decoding it."""
        manifest = asyncio.run(sender.send_weights(iter(weights), version, timeout_s=_TIMEOUT_S))
        assert manifest.version == version
        return Manifest.decode(manifest.encode())

    def move(
        self, sender: CheckpointEngine, receiver: CheckpointEngine, weights: Sequence[WeightTensor], version: int
    ) -> None:
        """Run one sync and compare all bytes."""
        manifest = self.send(sender, weights, version)
        assert_same(asyncio.run(self.receive(sender, receiver, manifest)), weights)
        receiver.confirm(manifest)
        sender.finalize(version)

    def test_declares_what_it_is(self) -> None:
        engine = self.make_engine()
        assert engine.API_VERSION == ENGINE_API_VERSION
        assert engine.name
        assert engine.capabilities.devices
        check_capabilities(type(engine))
        assert engine.prepare() == engine.prepare()
        engine.close()

    def test_every_element_type_arrives_bit_for_bit(self) -> None:
        sender, receiver = self.joined()
        for version, dtype in enumerate(STORAGE_DTYPES):
            self.move(sender, receiver, make_weights([(3, 5), (), (0, 4), (7,)], dtype=dtype, seed=version), version)
        _close(sender, receiver)

    def test_odd_shapes_arrive(self) -> None:
        sender, receiver = self.joined()
        self.move(sender, receiver, make_weights([(), (0,), (1,), (63,), (1, 1, 17), (5, 0, 2), (2**22 + 1,), (0,)]), 1)
        self.move(sender, receiver, make_weights([(0,)]), 2)
        _close(sender, receiver)

    def test_model_may_grow_and_shrink(self) -> None:
        sender, receiver = self.joined()
        for version, rows in enumerate([1, 1000, 10, 300_000, 0, 300_001]):
            self.move(sender, receiver, make_weights([(rows, 3), (5,)], seed=version), version)
        _close(sender, receiver)

    def test_twenty_syncs_need_no_more_resources_than_three(self) -> None:
        sender, receiver = self.joined()
        counts: list[tuple[int, int]] = []
        for version in range(20):
            self.move(sender, receiver, make_weights([(1000, 100), (33,)], seed=version), version)
            counts.append(_resources())
        _close(sender, receiver)
        first, last = counts[:3], counts[-3:]  # an ending thread may hold one for a moment
        descriptors, maps = (min(n[kind] for n in last) - max(n[kind] for n in first) for kind in (0, 1))
        assert descriptors <= 0, f"file descriptors and maps per sync: {counts}"
        assert maps <= 4, f"file descriptors and maps per sync: {counts}"

    def test_received_tensors_are_read_only(self) -> None:
        sender, receiver = self.joined()
        manifest = self.send(sender, make_weights([(4,)]), 1)
        (weight,) = asyncio.run(self.receive(sender, receiver, manifest))
        assert not weight.data.flags.writeable
        _close(sender, receiver)

    def test_committed_version_stays_for_late_joiners_until_the_next_is_finalized(self) -> None:
        sender, receiver = self.joined()
        first, second = make_weights([(100,)], seed=1), make_weights([(100,)], seed=2)
        manifest = self.send(sender, first, 1)
        sender.finalize(1)
        self.send(sender, second, 2)
        assert_same(asyncio.run(self.receive(sender, receiver, manifest)), first)
        sender.finalize(2)
        _close(sender, receiver)

    def test_stale_manifest_is_refused(self) -> None:
        sender, receiver = self.joined()
        stale = self.send(sender, make_weights([(100,)], seed=1), 1)
        asyncio.run(self.receive(sender, receiver, stale))
        sender.finalize(1)
        for version in (2, 3):
            self.move(sender, receiver, make_weights([(100,)], seed=version), version)
        assert "ersion 1" in refusal(self.receive(sender, receiver, stale))
        _close(sender, receiver)

    def test_confirm_tells_that_the_sender_went_on(self) -> None:
        sender, receiver = self.joined()
        want = make_weights([(100,)], seed=1)
        manifest = self.send(sender, want, 1)
        assert "ersion 1" in refusal(lambda: receiver.confirm(manifest))
        got = asyncio.run(self.receive(sender, receiver, manifest))
        receiver.confirm(manifest)
        sender.abort()
        if receiver.capabilities.zero_copy:
            assert "ersion 1" in refusal(lambda: receiver.confirm(manifest))
        else:
            other = self.another_receiver(sender)
            self.move(sender, other, make_weights([(100,)], seed=2), 1)
            receiver.confirm(manifest)
            assert_same(got, want)
            _close(other)
        _close(sender, receiver)

    def test_a_source_that_changes_after_verification_reaches_nobody(self) -> None:
        sender, receiver = self.joined()
        values = np.arange(400, dtype=np.uint8)
        want = values.tobytes()
        manifest = self.send(sender, [WeightTensor("w", "float32", (100,), values)], 1)
        (got,) = asyncio.run(self.receive(sender, receiver, manifest))
        values += 1
        if got.data.tobytes() == want:
            receiver.confirm(manifest)
        else:
            assert "'w' of version 1" in refusal(lambda: receiver.confirm(manifest))
        _close(sender, receiver)

    def test_an_unfinished_version_is_not_overwritten(self) -> None:
        sender, receiver = self.joined()
        first = make_weights([(100,)], seed=1)
        manifest = self.send(sender, first, 1)
        assert "version 1" in refusal(sender.send_weights(first, 2, timeout_s=_TIMEOUT_S))
        assert_same(asyncio.run(self.receive(sender, receiver, manifest)), first)
        sender.abort()
        self.move(sender, receiver, first, 1)
        _close(sender, receiver)

    def test_failed_send_leaves_the_committed_version(self) -> None:
        sender, receiver = self.joined()
        first = make_weights([(100,)], seed=1)
        manifest = self.send(sender, first, 1)
        sender.finalize(1)
        assert "broke" in refusal(sender.send_weights(_broken_source(), 2, timeout_s=_TIMEOUT_S))
        assert "w0" in refusal(sender.send_weights([*first, *first], 2, timeout_s=_TIMEOUT_S))
        assert "no tensor" in refusal(sender.send_weights([], 2, timeout_s=_TIMEOUT_S))
        assert "did not finish" in refusal(sender.send_weights(first, 2, timeout_s=0.0))
        assert "must increase" in refusal(sender.send_weights(first, 1, timeout_s=_TIMEOUT_S))
        assert_same(asyncio.run(self.receive(sender, receiver, manifest)), first)
        self.move(sender, receiver, make_weights([(100,)], seed=2), 2)
        _close(sender, receiver)

    def test_a_send_can_be_aborted_midway(self) -> None:
        sender, receiver = self.joined()
        big = make_weights([(10 << 20,)])

        async def abort_midway() -> None:
            sending = asyncio.create_task(sender.send_weights(big, 1, timeout_s=_TIMEOUT_S))
            await asyncio.sleep(0)
            sender.abort()
            await sending

        assert "abort" in refusal(abort_midway())
        self.move(sender, receiver, make_weights([(3,)]), 1)
        _close(sender, receiver)

    def test_receive_keeps_its_deadline(self) -> None:
        sender, receiver = self.joined()
        manifest = self.send(sender, make_weights([(4,)]), 7)
        message = refusal(receiver.receive_weights(manifest, timeout_s=0.0))
        assert "Receiving version 7" in message
        assert "engine" in message
        _close(sender, receiver)

    def test_truncated_manifest_is_refused(self) -> None:
        sender, receiver = self.joined()
        manifest = self.send(sender, make_weights([(4,), (6,)]), 1)
        data = manifest.encode()
        for cut in (0, 1, len(data) // 2, len(data) - 1):
            assert "manifest" in refusal(lambda size=cut: Manifest.decode(data[:size])).lower()
        _close(sender, receiver)

    def test_closed_sender_is_noticed(self) -> None:
        sender, receiver = self.joined()
        weights = make_weights([(4,)])
        manifest = self.send(sender, weights, 1)
        sender.finalize(1)
        _close(sender, sender)
        if sender.capabilities.durable:
            assert_same(asyncio.run(self.receive(sender, receiver, manifest)), weights)
        else:
            assert refusal(receiver.receive_weights(manifest, timeout_s=_TIMEOUT_S))
        _close(sender, receiver)

    def test_a_receiver_serves_late_joiners(self) -> None:
        sender, receiver = self.joined()
        if receiver.capabilities.caches and receiver.capabilities.elastic:
            weights = make_weights([(100,), (), (0,)])
            assert refusal(receiver.republish(timeout_s=_TIMEOUT_S))
            self.move(sender, receiver, weights, 4)
            assert_same(receiver.get_weights()[1], weights)
            manifest = asyncio.run(receiver.republish(timeout_s=_TIMEOUT_S))
            sender.close()
            joiner = self.make_engine()
            topology = type(joiner).build_topology(manifest.sender, [joiner.prepare()])
            joiner.init_process_group(topology.receivers[0])
            assert manifest.version == 4
            assert_same(asyncio.run(joiner.receive_weights(manifest, timeout_s=_TIMEOUT_S)), weights)
            _close(joiner)
        _close(sender, receiver)

    def test_a_receiver_relays_a_version_to_another(self) -> None:
        sender, receiver = self.joined()
        if receiver.capabilities.relays:
            other = self.make_engine()
            other.init_process_group(type(other).build_topology(sender.prepare(), [other.prepare()]).receivers[0])
            assert refusal(receiver.relay(timeout_s=_TIMEOUT_S))
            for version in (1, 2):
                weights = make_weights([(100,), (), (0,), (300, 1000)], seed=version)
                manifest = self.send(sender, weights, version)
                asyncio.run(receiver.receive_weights(manifest, timeout_s=_TIMEOUT_S))
                assert not receiver.relayed
                relayed = asyncio.run(receiver.relay(timeout_s=_TIMEOUT_S))
                assert relayed.same_weights(manifest)
                assert_same(asyncio.run(other.receive_weights(relayed, timeout_s=_TIMEOUT_S)), weights)
                assert other.relayed
                sender.finalize(version)
            _close(other)
        else:
            assert refusal(receiver.relay(timeout_s=_TIMEOUT_S))
        _close(sender, receiver)

    def test_prefetched_weights_are_those_that_were_sent(self) -> None:
        sender, receiver = self.joined()
        if not receiver.capabilities.prefetches:
            assert refusal(receiver.prefetch(1, timeout_s=_TIMEOUT_S))
            _close(sender, receiver)
            return
        shapes = [(100,), (300, 1000), (0,), (7,)]
        asyncio.run(receiver.prefetch(1, timeout_s=_TIMEOUT_S))
        for version in (1, 2):  # a sender may have two memories
            self.move(sender, receiver, make_weights(shapes, seed=version), version)
        want = make_weights(shapes, seed=3)

        async def prefetched() -> list[WeightTensor]:
            await receiver.prefetch(3, timeout_s=_TIMEOUT_S)
            manifest = await sender.send_weights(iter(want), 3, timeout_s=_TIMEOUT_S)
            return await receiver.receive_weights(manifest, timeout_s=_TIMEOUT_S)

        assert_same(asyncio.run(prefetched()), want)
        assert receiver.prefetched_nbytes >= want[1].nbytes
        sender.finalize(3)
        self.move(sender, receiver, make_weights(shapes, seed=4), 4)
        assert receiver.prefetched_nbytes == 0
        _close(sender, receiver)

    def test_a_prefetch_of_something_else_changes_nothing(self) -> None:
        sender, receiver = self.joined()
        if not receiver.capabilities.prefetches:
            _close(sender, receiver)
            return
        shapes = [(100,), (300, 100), (7,)]
        for version in (1, 2):
            self.move(sender, receiver, make_weights(shapes, seed=version), version)
        other, want = make_weights(shapes, seed=3), make_weights(shapes, seed=4)
        resized = make_weights([(90,), (300, 101), (8,)], seed=5)

        async def prefetched(
            attempts: Sequence[Sequence[WeightTensor]], version: int, expected: int
        ) -> list[WeightTensor]:
            *failed, sent = attempts
            await receiver.prefetch(expected, timeout_s=_TIMEOUT_S)
            for weights in failed:
                await sender.send_weights(iter(weights), version, timeout_s=_TIMEOUT_S)
                await asyncio.sleep(0.05)  # to be prefetched
                sender.abort()
            manifest = await sender.send_weights(iter(sent), version, timeout_s=_TIMEOUT_S)
            return await receiver.receive_weights(manifest, timeout_s=_TIMEOUT_S)

        cases = [([other, want], 3, 3), ([other], 4, 9), ([resized], 5, 5), ([want], 6, 6)]
        for attempts, version, expected in cases:
            assert_same(asyncio.run(prefetched(attempts, version, expected)), attempts[-1])
            sender.finalize(version)
        _close(sender, receiver)

    def test_receiver_must_have_joined(self) -> None:
        sender, receiver = self.joined()
        manifest = self.send(sender, make_weights([(4,)]), 1)
        stranger = self.make_engine()
        assert refusal(stranger.receive_weights(manifest, timeout_s=_TIMEOUT_S))
        assert refusal(lambda: stranger.init_process_group(b"\x00rubbish"))
        assert refusal(lambda: type(sender).build_topology(b"\x00rubbish", []))
        _close(sender, receiver, stranger)


def _broken_source() -> Iterator[WeightTensor]:
    yield make_weights([(5,)])[0]
    raise WeightSyncError("the source broke")


async def _join(*engines: CheckpointEngine) -> None:
    """Join all members of a group concurrently."""
    await asyncio.gather(*(engine.join(timeout_s=_TIMEOUT_S) for engine in engines if not engine.capabilities.elastic))


def _close(*engines: CheckpointEngine) -> None:
    for engine in engines:
        engine.close()


def _resources() -> tuple[int, int]:
    """Open file descriptors and memory maps of this process."""
    return len(list(Path("/proc/self/fd").iterdir())), len(Path("/proc/self/maps").read_text().splitlines())
