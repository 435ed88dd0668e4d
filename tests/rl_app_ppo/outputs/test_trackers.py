"""TensorBoard reads the events of its sink."""

from __future__ import annotations

import os
import time

import pytest

from rl_app_ppo.outputs.trackers import TensorBoardSink


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_tensorboard_reads_its_events(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path)
    sink.log(1, {"actor/pg_loss": 0.25})
    sink.log(2, {"actor/pg_loss": 0.125})
    sink.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("actor/pg_loss")] == [(1, 0.25), (2, 0.125)]


@pytest.mark.parametrize("set_back", [0, 3600])
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_tensorboard_reads_a_resumed_run_after_the_attempt_before(tmp_path, monkeypatch, set_back):
    """Also within one second, by a process with a lower id, and after the clock was set back."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    first = TensorBoardSink(tmp_path)
    for step in range(1, 5):
        first.log(step, {"a": step})
    first.close()
    monkeypatch.setattr(time, "time", lambda: now - set_back)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    resumed = TensorBoardSink(tmp_path, after=2)
    resumed.log(3, {"a": 30})
    resumed.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("a")] == [(1, 1), (2, 2), (3, 30)]
