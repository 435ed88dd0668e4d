"""Long syncs report progress; short ones do not."""

from __future__ import annotations

import asyncio
import io

import pytest
from ckpt_fakes import FaultyReceiver, FaultySender, Source, model

from rl_ckpt_engine import CheckpointEngineConfig, CheckpointEngineManager, ProgressBar, ReceiveAck, SyncProgress
from rl_ckpt_engine.sync import progress
from rl_protocol.errors import WeightSyncError, WorkerError


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "QUIET_S", 0.1)
    monkeypatch.setattr(progress, "_EVERY_S", 0.05)


def test_the_phase_that_hangs_is_told_and_the_end_comes_once() -> None:
    told: list[SyncProgress] = []
    told_twice = asyncio.Event()

    def tell(entry: SyncProgress) -> None:
        told.append(entry)
        if [entry.phase for entry in told].count("receive") >= 2:
            told_twice.set()

    class Slow(FaultyReceiver):
        async def receive(self, manifest: bytes, timeout_s: float) -> ReceiveAck:
            await told_twice.wait()
            raise WorkerError("gone")

    config = CheckpointEngineConfig(timeout_s=60)
    manager = CheckpointEngineManager(FaultySender(Source(model(1))), [Slow("slow")], config, progress=tell)
    with pytest.raises(WeightSyncError, match="receive: slow"):
        asyncio.run(manager.update_weights(7))
    assert {entry.version for entry in told} == {7}
    assert [entry.phase for entry in told].count("receive") >= 2
    assert [entry.phase for entry in told if entry.phase == "done"] == ["done"]
    assert told[-1].phase == "done"
    seconds = [entry.seconds for entry in told]
    assert seconds == sorted(seconds)
    assert seconds[0] >= 0.1


def test_a_quick_sync_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "QUIET_S", 30.0)
    told: list[SyncProgress] = []
    sender = FaultySender(Source(model(1)))
    manager = CheckpointEngineManager(sender, [FaultyReceiver("r0")], progress=told.append)
    asyncio.run(manager.update_weights(1))
    assert told == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_draws_on_terminals_alone() -> None:
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        bar = ProgressBar(stream)
        bar(SyncProgress(3, "activate", 2.04))
        bar(SyncProgress(3, "done", 2.6))
    assert terminal.getvalue() == (
        "\rweights 3 [########....] activate   2.0 s\rweights 3 [############] done       2.6 s\n"
    )
    assert file.getvalue() == ""
