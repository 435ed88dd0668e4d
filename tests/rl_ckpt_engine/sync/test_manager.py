"""CheckpointEngineManager with handles that fail or hang in every phase."""

from __future__ import annotations

import asyncio
import gc
import logging
import warnings

import msgspec
import numpy as np
import pytest
from ckpt_fakes import Fault, FaultyReceiver, FaultySender, Source, model, system

from rl_ckpt_engine import CheckpointEngineConfig, CheckpointEngineManager, ReceiveAck
from rl_ckpt_engine.testing import refusal
from rl_protocol.errors import ConfigError, WeightSyncError, WorkerError
from rl_protocol.ports import WeightSync

PHASES = ["receive", "activate"]
FAULTS = [WorkerError("worker 7 died"), ConnectionResetError("gone"), TimeoutError(), Fault.HANG]


def test_a_sync_brings_every_receiver_to_the_version() -> None:
    sender, receivers, manager = system(None, None)
    assert isinstance(manager, WeightSync)
    assert manager.version is None
    assert manager.metrics == {}
    report = asyncio.run(manager.update_weights(1))
    assert (report.version, report.receivers) == (1, ("r0", "r1"))
    assert report.num_bytes == sum(w.nbytes for w in model(1))
    assert manager.version == 1
    assert sender.calls == ["send", "finalize"]
    for receiver in receivers:
        assert receiver.calls == ["receive", "activate"]
        assert receiver.sink.loaded == {w.name: w.data.tobytes() for w in model(1)}
        assert receiver.admitting
    metrics = manager.metrics
    assert metrics["weight_sync/bytes"] == report.num_bytes
    assert metrics["weight_sync/version"] == 1
    assert metrics["weight_sync/receivers"] == 2
    assert metrics["weight_sync/quarantined"] == 0
    spent = [metrics[f"weight_sync/{phase}_seconds"] for phase in ("send", "receive", "activate")]
    assert sum(spent) <= metrics["weight_sync/seconds"]
    assert metrics["weight_sync/gib_per_second"] > 0
    parts = metrics["weight_sync/move_seconds"], metrics["weight_sync/verify_seconds"]
    assert min(parts) > 0
    assert max(parts) <= metrics["weight_sync/receive_seconds"]
    assert metrics["weight_sync/lag"] == 1


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f if isinstance(f, str) else type(f).__name__)
def test_one_that_fails_is_quarantined_and_the_others_go_on(
    phase: str, fault: BaseException | str, caplog: pytest.LogCaptureFixture
) -> None:
    sender, (good, bad), manager = system(None, Fault(**{phase: fault}))
    with caplog.at_level(logging.WARNING):
        report = asyncio.run(manager.update_weights(1))
    assert report.receivers == ("r0",)
    assert list(manager.quarantined) == ["r1"]
    assert f"{phase}: r1" in manager.quarantined["r1"]
    assert len([r for r in caplog.records if "r1" in r.getMessage()]) == 1
    assert good.admitting
    assert bad.calls[-1] == "pause", "the others have left it behind"
    assert not bad.admitting
    assert sender.calls == ["send", "finalize"]
    calls = list(bad.calls)
    asyncio.run(manager.update_weights(2))
    assert bad.calls == calls, "a quarantined receiver is not called again"
    assert manager.metrics["weight_sync/quarantined"] == 1


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f if isinstance(f, str) else type(f).__name__)
def test_when_all_fail_each_is_named_and_all_resume(phase: str, fault: BaseException | str) -> None:
    sender, receivers, manager = system(Fault(**{phase: fault}), Fault(**{phase: fault}))
    message = refusal(manager.update_weights(1))
    for receiver in receivers:
        assert f"{phase}: {receiver.name}" in message
        assert receiver.calls[-1] == "resume"
        assert receiver.admitting
        assert receiver.sink.weight_version == 0
    assert not manager.quarantined
    assert sender.calls[-1] == "abort"
    for receiver in receivers:
        receiver.fault = Fault()
    assert asyncio.run(manager.update_weights(1)).receivers == ("r0", "r1"), "the same version may be tried again"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f if isinstance(f, str) else type(f).__name__)
def test_a_failing_sender_leaves_all_receivers_serving(fault: BaseException | str) -> None:
    sender, receivers, manager = system(None, None, sender=Fault(send=fault))
    assert "send: the sender" in refusal(manager.update_weights(1))
    assert sender.calls == ["send", "abort"]
    assert all(receiver.calls == ["resume"] and receiver.admitting for receiver in receivers)
    sender.fault = Fault()
    assert asyncio.run(manager.update_weights(1)).receivers == ("r0", "r1")


def test_a_sender_that_can_not_abort_or_finalize_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    sender, _, manager = system(None, sender=Fault(send=OSError("x"), abort=OSError("y"), finalize=OSError("z")))
    assert "x" in refusal(manager.update_weights(1))
    sender.fault.phases.pop("send")
    asyncio.run(manager.update_weights(1))
    assert ["y" in caplog.text, "z" in caplog.text] == [True, True]
    assert "version 1" in refusal(manager.update_weights(2)), "the sender still holds version 1"
    sender.fault = Fault()
    assert "version 1" in refusal(manager.update_weights(2))
    assert asyncio.run(manager.update_weights(3)).version == 3


def test_weights_that_fit_no_receiver_quarantine_none() -> None:
    sender, receivers, manager = system(None, None)
    sender._source.weights = model(1)[1:]
    message = refusal(manager.update_weights(1))
    assert message.count("w0") == 2
    assert all(r.admitting and r.sink.weight_version == 0 for r in receivers)
    assert not manager.quarantined


def test_replicas_generate_until_they_load_and_after_it() -> None:
    """Generation pauses only while the weights load, not while they are sent and verified."""
    seen: dict[str, list[bool]] = {"send": [], "receive": [], "load": []}

    class Watched(FaultyReceiver):
        async def receive(self, manifest: bytes, timeout_s: float) -> ReceiveAck:
            seen["receive"].append(self.admitting)
            return await super().receive(manifest, timeout_s)

    class Model(Source):
        def named_weights(self):
            seen["send"].append(receiver.admitting)
            return super().named_weights()

    receiver = Watched("r0")
    load = receiver.sink.load_weights

    def loading(weights, version: int) -> None:
        seen["load"].append(receiver.admitting)
        load(weights, version)

    receiver.sink.load_weights = loading
    manager = CheckpointEngineManager(FaultySender(Model(model(1))), [receiver])
    asyncio.run(manager.update_weights(1))
    assert seen == {"send": [True], "receive": [True], "load": [False]}
    assert receiver.admitting


def test_when_all_fail_one_that_can_not_resume_either_is_quarantined() -> None:
    dead = WorkerError("died")
    _, receivers, manager = system(Fault(receive=dead), Fault(receive=dead, resume=dead))
    assert "receive: r1" in refusal(manager.update_weights(1))
    assert list(manager.quarantined) == ["r1"]
    assert receivers[0].admitting


def test_what_a_source_raises_is_raised_as_it_is_and_all_resume() -> None:
    sender, receivers, manager = system(None, None, sender=Fault(send=ValueError("no gradient")))
    with pytest.raises(ValueError, match="no gradient"):
        asyncio.run(manager.update_weights(1))
    assert sender.calls == ["send", "abort"]
    assert all(receiver.admitting for receiver in receivers)


def test_a_bug_in_a_handle_flies_and_all_resume() -> None:
    sender, receivers, manager = system(None, Fault(receive=ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        asyncio.run(manager.update_weights(1))
    assert all(receiver.calls[-1] == "resume" for receiver in receivers)
    assert sender.calls[-1] == "abort"


def test_cancelling_a_sync_resumes_all() -> None:
    hanging = asyncio.Event()

    class Hanging(FaultyReceiver):
        async def receive(self, manifest: bytes, timeout_s: float) -> ReceiveAck:
            hanging.set()
            await asyncio.Event().wait()
            return await super().receive(manifest, timeout_s)

    sender, receivers = FaultySender(Source(model(1))), [FaultyReceiver("r0"), Hanging("r1")]
    manager = CheckpointEngineManager(sender, receivers, CheckpointEngineConfig(timeout_s=60))

    async def run() -> None:
        sync = asyncio.create_task(manager.update_weights(1))
        await asyncio.wait_for(hanging.wait(), 60)
        sync.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sync

    asyncio.run(run())
    assert all(receiver.calls[-1] == "resume" for receiver in receivers)
    assert sender.calls[-1] == "abort"


def test_a_sync_that_is_cancelled_before_its_calls_run_has_made_none() -> None:
    async def run(ticks: int) -> bool:
        _, _, manager = system(None, None)
        sync = asyncio.create_task(manager.update_weights(1))
        for _ in range(ticks):
            await asyncio.sleep(0)
        sync.cancel()
        await asyncio.wait([sync])
        return sync.cancelled()

    for ticks in range(1, 100):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            cancelled = asyncio.run(run(ticks))
            gc.collect()
        assert not [str(warning.message) for warning in found], f"cancelled after {ticks} ticks"
        if not cancelled:
            assert ticks > 5
            return
    raise AssertionError("the sync has not ended")


def test_versions_must_grow_and_only_one_sync_runs() -> None:
    _, _, manager = system(None)

    async def run() -> None:
        first = asyncio.create_task(manager.update_weights(4))
        await asyncio.sleep(0)
        with pytest.raises(WeightSyncError, match="Version 5 can't be synchronized while version 4 is"):
            await manager.update_weights(5)
        await first
        for stale in (4, 3, -1):
            with pytest.raises(WeightSyncError, match="must increase; the last one was 4"):
                await manager.update_weights(stale)

    asyncio.run(run())


def test_versions_are_integers_of_any_type() -> None:
    _, _, manager = system(None)

    async def run() -> None:
        for wrong in (1.5, "7", None):
            with pytest.raises(WeightSyncError, match=f"must be an integer; got {wrong!r}"):
                await manager.update_weights(wrong)  # type: ignore[arg-type]
        report = await manager.update_weights(np.int64(2))  # type: ignore[arg-type]
        assert (type(report.version), report.version, manager.version) == (int, 2, 2)

    asyncio.run(run())


class Liar(FaultyReceiver):
    """Returns a wrong digest in its acknowledgement, or a wrong active version."""

    def __init__(self, name: str, *, ack: bool) -> None:
        super().__init__(name)
        self._lies_in_ack = ack

    async def receive(self, manifest: bytes, timeout_s: float) -> ReceiveAck:
        ack = await super().receive(manifest, timeout_s)
        return msgspec.structs.replace(ack, digest=b"?") if self._lies_in_ack else ack

    async def activate(self, version: int, timeout_s: float) -> int:
        return await super().activate(version, timeout_s) - (not self._lies_in_ack)


@pytest.mark.parametrize("ack", [True, False])
def test_wrong_acknowledgements_are_not_believed(ack: bool) -> None:
    receivers = [FaultyReceiver("r0"), Liar("r1", ack=ack)]
    manager = CheckpointEngineManager(FaultySender(Source(model(1))), receivers)
    assert asyncio.run(manager.update_weights(1)).receivers == ("r0",)
    assert list(manager.quarantined) == ["r1"]


def test_newcomers_catch_up_with_the_last_version() -> None:
    _, _, manager = system(None)
    before, after = FaultyReceiver("before"), FaultyReceiver("after")

    async def run() -> None:
        await manager.add_receiver(before)
        assert before.calls == []
        await manager.update_weights(1)
        await manager.add_receiver(after)

    asyncio.run(run())
    assert after.calls == ["pause", "receive", "activate", "resume"]
    assert after.admitting
    assert [r.sink.weight_version for r in (before, after)] == [1, 1]
    assert manager.receivers == ("r0", "before", "after")


def test_a_newcomer_waits_for_the_sync_that_runs() -> None:
    _, _, manager = system(None)
    late = FaultyReceiver("late")

    async def run() -> None:
        sync = asyncio.create_task(manager.update_weights(1))
        await asyncio.sleep(0)
        await manager.add_receiver(late)
        assert sync.done()

    asyncio.run(run())
    assert late.sink.weight_version == 1


def test_catching_up_fails_when_the_sender_has_gone_on() -> None:
    sender, _, manager = system(None)
    asyncio.run(manager.update_weights(1))
    sender.close()
    late = FaultyReceiver("late")
    assert "a new sync is needed" in refusal(manager.add_receiver(late)).lower()
    assert manager.receivers == ("r0",)


def test_quarantined_receivers_come_back_or_are_removed() -> None:
    _, (_, bad), manager = system(None, Fault(receive=WorkerError("no")))
    asyncio.run(manager.update_weights(1))
    bad.fault = Fault()
    asyncio.run(manager.add_receiver(bad))
    assert not manager.quarantined
    assert bad.sink.weight_version == 1
    with pytest.raises(ConfigError, match="Two receivers have the name 'r1'"):
        asyncio.run(manager.add_receiver(bad))
    manager.remove_receiver("r1")
    with pytest.raises(ConfigError, match="no receiver 'r1'"):
        manager.remove_receiver("r1")
    manager.remove_receiver("r0")
    assert "there is no receiver" in refusal(manager.update_weights(2))


def test_names_must_differ() -> None:
    with pytest.raises(ConfigError, match="Two receivers have the name 'r0'"):
        CheckpointEngineManager(FaultySender(Source(model(1))), [FaultyReceiver("r0"), FaultyReceiver("r0")])


def test_disabled_says_so_once_and_calls_no_receiver(caplog: pytest.LogCaptureFixture) -> None:
    sender, receiver = FaultySender(Source(model(1))), FaultyReceiver("r0")
    manager = CheckpointEngineManager(sender, [receiver], CheckpointEngineConfig(enabled=False))
    for version in (1, 2):
        report = asyncio.run(manager.update_weights(version))
        assert (report.receivers, report.num_bytes) == ((), 0)
    assert caplog.text.count("keeps its initial weights") == 1
    assert sender.calls == receiver.calls == []
