"""TensorBoard reads the events of its sink."""

from __future__ import annotations

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
