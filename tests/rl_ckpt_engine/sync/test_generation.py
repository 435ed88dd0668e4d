"""GenerationControl: pause, resume, sleep and wake all replicas."""

from __future__ import annotations

import asyncio

import pytest
from ckpt_fakes import Fault, FaultyReceiver, FaultySender, Sink, Source, model, system

from rl_ckpt_engine import CheckpointEngineManager, ReceiverEndpoint
from rl_ckpt_engine.engines.one_host.naive import NaiveEngine
from rl_ckpt_engine.testing import refusal
from rl_protocol.errors import WeightSyncError, WorkerError
from rl_protocol.ports import WeightCapabilities


def test_generation_stops_everywhere_until_it_is_resumed_also_for_newcomers_and_across_a_sync() -> None:
    _, receivers, manager = system(None, None)
    new = FaultyReceiver("new")

    async def run() -> None:
        await manager.generation.abort()
        assert not any(receiver.admitting for receiver in receivers)
        await manager.update_weights(1)
        await manager.add_receiver(new)
        assert [r.sink.weight_version for r in (*receivers, new)] == [1, 1, 1]
        assert not any(receiver.admitting for receiver in (*receivers, new))
        await manager.generation.resume()
        assert all(receiver.admitting for receiver in (*receivers, new))

    asyncio.run(run())


@pytest.mark.parametrize(
    "fault", [{"sender": Fault(send=OSError("x"))}, {"receiver": Fault(activate=WorkerError("no"))}]
)
def test_a_sync_that_fails_while_generation_is_stopped_starts_it_nowhere(fault: dict[str, Fault]) -> None:
    sender, (receiver,), manager = system(fault.get("receiver"), sender=fault.get("sender"))

    async def run() -> None:
        await manager.generation.abort()
        with pytest.raises(WeightSyncError):
            await manager.update_weights(1)
        assert not receiver.admitting
        await manager.generation.resume()
        assert receiver.admitting
        assert receiver.sink.weight_version == 0

    asyncio.run(run())
    assert not manager.quarantined
    assert sender.calls == ["send", "abort"]


def test_one_that_does_not_stop_is_quarantined_and_when_none_does_it_is_an_error() -> None:
    _, receivers, manager = system(None, Fault(pause=Fault.HANG))
    asyncio.run(manager.generation.abort())
    assert "pause: r1" in manager.quarantined["r1"]
    receivers[0].fault = Fault(resume=WorkerError("died"))
    assert "resume: r0" in refusal(manager.generation.resume())
    assert manager.receivers == ("r0",)


class SleepySink(Sink):
    """Logs its calls, and says that sleep frees 100 bytes."""

    capabilities = WeightCapabilities(pauses=True, sleeps=True, drops_weights=True)

    def __init__(self) -> None:
        super().__init__(model(0))
        self.log: list[object] = []

    async def pause(self) -> None:
        self.log.append("pause")

    async def resume(self) -> None:
        self.log.append("resume")

    async def sleep(self, level: int) -> int | None:
        self.log.append(("sleep", level))
        return 100

    async def wake(self, part: str | None = None) -> None:
        self.log.append(("wake", part))


class KeepsItsWeights(SleepySink):
    """Can't drop its weights, and does not count what it frees."""

    capabilities = WeightCapabilities(sleeps=True)

    async def sleep(self, level: int) -> int | None:
        await super().sleep(level)
        return None


def sleepy(
    *kinds: type[SleepySink],
) -> tuple[list[SleepySink], list[ReceiverEndpoint], CheckpointEngineManager]:
    sinks = [kind() for kind in kinds or (SleepySink, SleepySink)]
    receivers = [ReceiverEndpoint(NaiveEngine(), sink, name=f"r{i}") for i, sink in enumerate(sinks)]
    return sinks, receivers, CheckpointEngineManager(FaultySender(Source(model(1))), receivers)


def test_replicas_sleep_wake_in_stages_and_end_what_runs() -> None:
    sinks, receivers, manager = sleepy()

    async def run() -> None:
        assert await manager.generation.release_kv_cache() == 200
        await manager.generation.resume_kv_cache()
        await manager.generation.abort()
        await manager.generation.resume()

    asyncio.run(run())
    for sink in sinks:
        assert sink.log == [("sleep", 1), ("wake", "weights"), ("wake", "kv_cache"), "pause", "resume"]
    assert all(receiver.admitting for receiver in receivers)


def test_weights_that_were_given_up_are_sent_before_anything_is_generated() -> None:
    _, receivers, manager = sleepy()

    async def run() -> None:
        await manager.generation.sleep(2)
        assert not any(receiver.admitting for receiver in receivers)
        await manager.generation.wake("weights")
        assert "has dropped its weights" in await message_of(manager.generation.resume())
        await manager.update_weights(1)
        await manager.generation.wake("kv_cache")

    async def message_of(call) -> str:
        with pytest.raises(WeightSyncError) as error:
            await call
        return str(error.value)

    asyncio.run(run())
    assert all(receiver.admitting and receiver._sink.weight_version == 1 for receiver in receivers)
    assert not manager.quarantined


def test_one_that_can_not_drop_its_weights_keeps_them_and_only_what_is_counted_is_reported() -> None:
    sinks, receivers, manager = sleepy(SleepySink, KeepsItsWeights)
    assert asyncio.run(manager.generation.sleep(2)) == 100
    assert [sink.log for sink in sinks] == [[("sleep", 2)], [("sleep", 1)]]
    assert [receiver.admitting for receiver in receivers] == [False, True]
    assert asyncio.run(sleepy(KeepsItsWeights)[2].generation.sleep(1)) is None


def test_who_can_not_sleep_says_so() -> None:
    _, receivers, manager = system(None)
    assert "Sink does not declare sleeps" in refusal(manager.generation.sleep())
    assert "levels are 1 and 2" in refusal(manager.generation.sleep(3))
    assert receivers[0].admitting
