"""A sync that takes long says how far it is; one that does not says nothing."""

from __future__ import annotations

import asyncio
import io

import pytest
from ckpt_fakes import Fault, FaultyReceiver, FaultySender, Source, model

from rl_ckpt_engine import CheckpointEngineConfig, CheckpointEngineManager, ProgressBar, SyncProgress, progress
from rl_protocol.errors import WeightSyncError

SHORT = CheckpointEngineConfig(timeout_s=0.3)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "QUIET_S", 0.1)
    monkeypatch.setattr(progress, "_EVERY_S", 0.05)


def test_the_phase_that_hangs_is_told_and_the_end_comes_once() -> None:
    told: list[SyncProgress] = []
    slow = FaultyReceiver("slow", Fault(receive=Fault.HANG))
    manager = CheckpointEngineManager(FaultySender(Source(model(1))), [slow], SHORT, progress=told.append)
    with pytest.raises(WeightSyncError, match="receive: slow did not answer"):
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
