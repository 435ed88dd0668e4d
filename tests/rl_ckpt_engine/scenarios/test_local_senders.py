"""Each rank of the trainer sends the weights to the receiver in its own process."""

from __future__ import annotations

import asyncio

import pytest
from ckpt_fakes import Fault, FaultyReceiver, FaultySender, Source, model

from rl_ckpt_engine import CheckpointEngineConfig, CheckpointEngineManager
from rl_protocol.errors import WeightSyncError

NAMES = ("rollout", "rollout-1", "rollout-2")


def ranks(*seeds: int, fault: Fault | None = None):
    """A manager of three ranks, their senders, and their receivers; the last has the fault."""
    senders = [FaultySender(Source(model(seed))) for seed in seeds]
    receivers = [FaultyReceiver(name, fault if name == NAMES[-1] else None) for name in NAMES]
    manager = CheckpointEngineManager(
        senders[0],
        receivers,
        CheckpointEngineConfig(backend="naive", timeout_s=0.5),
        local_senders=dict(zip(NAMES[1:], senders[1:], strict=True)),
    )
    return manager, senders, receivers


def test_every_receiver_computes_with_the_tensors_of_its_own_process() -> None:
    manager, senders, receivers = ranks(1, 1, 1)
    report = asyncio.run(manager.update_weights(1))
    assert report.receivers == NAMES
    assert [sender.calls for sender in senders] == [["send", "finalize"]] * 3
    for sender, receiver in zip(senders, receivers, strict=True):
        _, held = receiver._engine.get_weights()
        assert [id(tensor.data) for tensor in held] == [id(tensor.data) for tensor in sender._source.weights]
        assert receiver.sink.weight_version == 1


def test_ranks_whose_weights_differ_are_refused_before_anything_is_received() -> None:
    manager, senders, receivers = ranks(1, 1, 2)

    async def run() -> None:
        with pytest.raises(WeightSyncError, match="the rank in the process of rollout-2 has other weights"):
            await manager.update_weights(1)
        senders[2]._source.weights = model(1)
        await manager.update_weights(2)

    asyncio.run(run())
    assert [sender.calls for sender in senders] == [["send", "abort", "send", "finalize"]] * 3
    assert [receiver.calls.count("receive") for receiver in receivers] == [1] * 3
    assert {receiver.sink.weight_version for receiver in receivers} == {2}


def test_a_rank_that_can_not_send_ends_the_sync_and_the_next_one_works() -> None:
    manager, senders, receivers = ranks(1, 1, 1)
    senders[1].fault = Fault(send=OSError("no memory"))

    async def run() -> None:
        with pytest.raises(WeightSyncError, match="no memory"):
            await manager.update_weights(1)
        senders[1].fault = Fault()
        await manager.update_weights(2)

    asyncio.run(run())
    assert {receiver.sink.weight_version for receiver in receivers} == {2}


def test_a_receiver_that_fails_is_quarantined_and_its_rank_goes_on_sending() -> None:
    manager, senders, receivers = ranks(1, 1, 1, fault=Fault(receive=WeightSyncError("damaged")))

    async def run() -> None:
        for version in (1, 2):
            report = await manager.update_weights(version)
            assert report.receivers == NAMES[:2]

    asyncio.run(run())
    assert "damaged" in manager.quarantined["rollout-2"]
    assert senders[2].calls == ["send", "finalize"] * 2
    assert receivers[2].sink.weight_version == 0
