"""One small run with all outputs on: traces, Ray's timeline, training samples and MLflow."""

from __future__ import annotations

import gzip
import json

import pytest

from rl_trainer.record.read_record import read_record


@pytest.mark.slow
def test_a_run_leaves_traces_samples_and_mlflow(app):
    small = ("trainer.total_training_steps=1", "rollout.n=4", "placement=separate", "data.val_size=8")
    done = app("trainer.profile_steps=1", "trainer.test_freq=1", "trainer.logger=console,mlflow", *small)
    assert done.code == 0, done.err
    (folder,) = (done.folder / "profile").glob("step-*")
    assert folder.name == "step-000001"
    found = {path.name.removesuffix(".json.gz") for path in folder.iterdir()}
    assert {"actor", "rollout-0"} <= found
    for process in found:
        events = json.loads(gzip.decompress((folder / f"{process}.json.gz").read_bytes()))["traceEvents"]
        names = {event.get("name") for event in events}
        assert "aten::linear" in names, process
    timeline = json.loads((done.folder / "profile" / "ray.json").read_text())
    assert "task::WorkerProcess.call" in {event["cat"] for event in timeline}
    record = read_record(done.folder / "record")
    assert len(record.trajectories) == 32
    assert all(row.reward and row.advantages and row.old_log_probs for row in record.trajectories)
    assert {"rollout", "reward", "adv", "update_actor", "weights.send"} <= {span.stage for span in record.spans}
    assert [row.step for row in record.steps] == [0, 1]
    ((version, num_bytes, receivers),) = {(row.version, row.num_bytes, row.receivers) for row in record.syncs}
    assert (version, receivers) == (1, 1)
    assert num_bytes > 1 << 20
    assert record.end.outcome == "finished"
    assert list((done.folder / "mlflow").glob("*/*/metrics/actor/pg_loss"))
    log = (done.folder / "logs" / "driver.log").read_text()
    assert "loses steps" not in log
    assert "failed" not in log
