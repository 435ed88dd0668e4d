"""Loggers by name: a failing logger does not stop the run.

The steps it did not record are counted, and reported once.
"""

from __future__ import annotations

import json
import logging
import os
import re
import struct
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from rl_app_ppo.config.loading import load_config
from rl_app_ppo.outputs.metric_sinks import BackgroundSink, SinkKind, logger_names, open_sinks
from rl_app_ppo.outputs.sample_tables import COLUMNS, SampleTable
from rl_app_ppo.outputs.trackers import MlflowSink, RunFacts, TrackioSink, WandbSink
from rl_protocol import ConfigError
from rl_protocol.testing.bigram_model import ListSink
from rl_protocol.testing.metrics_suite import MetricSinkSuite

CELLS = {
    "step": 1,
    "key": "p-0/0/0",
    "why": "best",
    "prompt": "37+45=",
    "response": "<b>82</b>",
    "ground_truth": "82",
    "reward": 0.75,
    "parts": '{"exact_match/score": 1.0}',
    "advantage": None,
    "tokens": 3,
    "turns": 1,
    "failure": "",
}
TABLE = SampleTable(1, [[CELLS[name] for name in COLUMNS]])


class TestBackground(MetricSinkSuite):
    def open_sink(self, folder):
        self.inner = ListSink()
        return BackgroundSink("list", lambda: self.inner)

    def read(self, sink, folder):
        sink.close()
        return [(step, name, value) for step, metrics in self.inner.records for name, value in metrics.items()]


def test_a_stuck_logger_neither_blocks_nor_ends_the_run_and_its_losses_are_counted(caplog):
    gate, seen = threading.Event(), []

    class Stuck(ListSink):
        def log(self, step, metrics):
            assert gate.wait(300)
            seen.append(step)

    sink = BackgroundSink("stuck", Stuck, capacity=4, close_s=300)
    start = time.monotonic()
    with caplog.at_level(logging.WARNING):
        for step in range(100):
            sink.log(step, {"a": 1.0})
        assert time.monotonic() - start < 60
        lost = sink.lost
        gate.set()
        sink.close()
        sink.close()
    assert lost in (95, 96)  # four are queued, and the sink may hold one
    assert len(seen) == 100 - lost
    messages = [r.getMessage() for r in caplog.records]
    assert messages == [
        "The logger stuck loses steps: it is too slow: 4 steps are waiting. The run continues; metrics.jsonl has all steps.",
        f"The logger stuck did not record {lost} steps: it is too slow: 4 steps are waiting.",
    ]


def test_one_that_never_ends_is_left_behind_in_time(caplog):
    gate = threading.Event()

    class Dead(ListSink):
        def log(self, step, metrics):
            gate.wait(300)

    sink = BackgroundSink("dead", Dead, close_s=0.2)
    sink.log(1, {})
    start = time.monotonic()
    sink.close()
    assert time.monotonic() - start < 60
    gate.set()
    assert "did not end within 0.2 s" in caplog.text
    gate.set()


@pytest.mark.parametrize("where", ["open", "log", "close"])
def test_one_that_raises_is_said_once(caplog, where):
    class Broken(ListSink):
        def __init__(self):
            super().__init__()
            if where == "open":
                raise ConnectionError("no route")

        def log(self, step, metrics):
            if where == "log":
                raise ConnectionError("no route")

        def close(self):
            if where == "close":
                raise ConnectionError("no route")

    said = list[str]()
    sink = BackgroundSink("broken", Broken, say=said.append)
    for step in range(5):
        sink.log(step, {})
    sink.close()
    assert sink.lost == (0 if where == "close" else 5)
    assert len(caplog.records) == (1 if where == "close" else 2)
    assert "no route" in caplog.text
    if where == "close":
        assert not said
    else:
        (line,) = said
        assert re.match(
            r"warning: The logger broken loses steps: ConnectionError: no route \(.*test_metric_sinks\.py:\d+\)\. The run",
            line,
        )


def test_the_logger_of_the_page(readme_code, tmp_path):
    names: dict[str, SinkKind] = {}
    exec(readme_code("apps/ppo/docs", 0, "runs.md"), names)
    sink = BackgroundSink("lines", lambda: names["LINES"].open(RunFacts(folder=tmp_path, config={})), close_s=300)
    sink.log(0, {})
    sink.log(1, {"critic/score/mean": 0.5})
    sink.close()
    assert (tmp_path / "lines.txt").read_text() == "0 None\n1 0.5\n"


def test_names_lists_and_installed_ones(install_plugins, monkeypatch, tmp_path):
    made = ListSink()
    install_plugins("rl_app_ppo.sinks", mine="someones_sink:it")
    install_plugins("rl_app_ppo.sinks", allowed=False, other="someones_sink:it")
    monkeypatch.setitem(sys.modules, "someones_sink", SimpleNamespace(it=SinkKind(lambda facts: made)))
    config = load_config(["trainer.logger=[console,mine]"])
    names = logger_names(config.trainer.logger)
    assert names == ("console", "mine")
    (sink,) = open_sinks(names, RunFacts(folder=tmp_path, config={}))
    sink.log(3, {"a": 2.0})
    sink.close()
    assert made.records == [(3, {"a": 2.0})]
    with pytest.raises(ConfigError, match=r"trainer\.logger must be one of .*; got 'wandbb'\. Did you mean 'wandb'\?"):
        logger_names(["console", "wandbb"])
    with pytest.raises(ConfigError, match=r"must be one of console, .*; got 'consol'\. Did you mean 'console'\?"):
        logger_names(["consol"])
    with pytest.raises(ConfigError, match=r"trainer\.logger='other': .* is installed but not allowed"):
        logger_names(["console", "other"])
    assert logger_names([]) == ()


def log_records(data: bytes):
    """Yield the records of a wandb file: LevelDB's log format after a 7-byte header.

    Its blocks have 32 KiB; each part of a record has a CRC, a length, a kind and its bytes.
    """
    place, parts = 7, []
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        parts.append(data[place + 7 : place + 7 + length])
        place += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            yield b"".join(parts)
            parts = []


def test_wandb_records_offline(tmp_path, monkeypatch, caplog):
    """wandb's own reader finds the logged values; wandb does not use the network."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    sink = BackgroundSink("wandb", lambda: WandbSink(RunFacts(folder=tmp_path, config={"rollout.n": 4})), close_s=300)
    for step in (1, 2):
        sink.log(step, {"actor/pg_loss": step / 4})
    sink.close()
    assert sink.lost == 0
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    from wandb.proto import wandb_internal_pb2

    def recorded():
        found = {}
        for data in log_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                found[int(items["_step"])] = float(items["actor/pg_loss"])
        return found

    deadline = time.monotonic() + 60  # wandb's process may still be writing
    while recorded() != {1: 0.25, 2: 0.5} and time.monotonic() < deadline:
        time.sleep(0.1)
    assert recorded() == {1: 0.25, 2: 0.5}
    assert wandb.run is None
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_wandb_has_tables_of_samples(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    sink = WandbSink(RunFacts(folder=tmp_path, config={}))
    sink.log(2, {"a": 1.0})
    sink.log_samples(TABLE)  # of a step before the newest
    sink.log(3, {"a": 1.0})
    sink.close()
    (path,) = tmp_path.glob("wandb/offline-run-*/files/media/table/samples_2_*.table.json")
    table = json.loads(path.read_text())
    assert [dict(zip(table["columns"], row, strict=True)) for row in table["data"]] == [CELLS]


def test_a_wandb_run_of_the_caller_stays_active(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    mine = wandb.init(project="mine", dir=str(tmp_path), settings=wandb.Settings(silent=True, console="off"))
    try:
        sink = WandbSink(RunFacts(folder=tmp_path, config={}))
        sink.log(1, {"a": 1.0})
        sink.close()
        assert wandb.run is mine
        mine.log({"b": 1.0})
    finally:
        mine.finish()


def test_mlflow_records_into_files_and_resumes_its_run(tmp_path, monkeypatch, caplog):
    """MLflow's own reader finds the logged values; characters it does not allow are replaced."""
    pytest.importorskip("mlflow")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("MLFLOW_ALLOW_FILE_STORE", "MLFLOW_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "true")
    facts = RunFacts(folder=tmp_path / "my run", config={"rollout.n": 4, "trainer.hooks": ""})
    facts.folder.mkdir()
    for steps in ((1, 2), (3,)):
        sink = BackgroundSink("mlflow", lambda: MlflowSink(facts), close_s=300)
        for step in steps:
            sink.log(step, {"val-core/s/acc/mean@4": step / 4, "reward/extra/./a,b.py:score/score": 1.0})
        sink.close()
        assert sink.lost == 0, caplog.text
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=(facts.folder / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("rl-app-ppo")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("my run", "FINISHED")
    assert run.data.params == {"rollout.n": "4", "trainer.hooks": ""}
    history = client.get_metric_history(run.info.run_id, "val-core/s/acc/mean_at_4")
    assert [(one.step, one.value) for one in history] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert set(run.data.metrics) == {"val-core/s/acc/mean_at_4", "reward/extra/a_b.py:score/score"}
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_mlflow_has_tables_of_samples(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("MLFLOW_ALLOW_FILE_STORE", "MLFLOW_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "true")
    sink = MlflowSink(RunFacts(folder=tmp_path, config={}))
    for step in range(1, 60):
        sink.log_samples(SampleTable(step, TABLE.rows))
    sink.close()
    (path,) = tmp_path.glob("mlflow/*/*/artifacts/samples/000001.json")
    table = json.loads(path.read_text())
    assert [dict(zip(table["columns"], row, strict=True)) for row in table["data"]] == [CELLS]
    (tag,) = tmp_path.glob("mlflow/*/*/tags/mlflow.loggedArtifacts")
    listed = json.loads(tag.read_text())
    assert (len(listed), listed[-1]) == (50, {"path": "samples/000059.json", "type": "table"})


def test_a_run_says_that_trackio_writes_into_the_folder_of_an_earlier_one(tmp_path, monkeypatch, caplog):
    monkeypatch.delenv("TRACKIO_DIR", raising=False)
    chosen = []

    class Utils:
        @property
        def TRACKIO_DIR(self) -> Path:
            chosen.append(Path(os.environ["TRACKIO_DIR"]))
            return chosen[0]

    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "trackio.run", SimpleNamespace(Run=lambda **_: None))
    monkeypatch.setitem(sys.modules, "trackio.table", SimpleNamespace(Table=None))
    monkeypatch.setitem(sys.modules, "trackio.utils", Utils())
    for name in ("first", "second"):
        TrackioSink(RunFacts(folder=tmp_path / name, config={}))
    assert chosen == [tmp_path / "first" / "trackio", tmp_path / "second" / "trackio"]
    (message,) = caplog.messages
    assert message.startswith(f"trackio writes to {chosen[0]}, not to {chosen[1]}: ")


@pytest.mark.slow
def test_trackio_records_into_the_run_folder_and_resumes_its_run(tmp_path, monkeypatch, caplog):
    """trackio's own reader finds the logged values.

    trackio is in the dependency group `bench`.
    """
    monkeypatch.setenv("TRACKIO_DIR", "undone after the test")
    monkeypatch.delenv("TRACKIO_DIR")
    facts = RunFacts(folder=tmp_path / "my run", config={"rollout.n": 4})
    facts.folder.mkdir()
    # only the sink imports it, because the import reads TRACKIO_DIR
    if find_spec("trackio") is None:
        pytest.skip("trackio is not installed: uv sync --group bench")
    for steps in ((1, 2), (3,)):
        sink = BackgroundSink("trackio", lambda: TrackioSink(facts), close_s=300)
        for step in steps:
            sink.log(step, {"val-core/s/acc/mean@4": step / 4})
        sink.close()
        assert sink.lost == 0, caplog.text
    again = TrackioSink(facts)
    again.log_samples(TABLE)
    again.close()
    from trackio import Api
    from trackio.sqlite_storage import SQLiteStorage

    assert SQLiteStorage.get_project_db_path("rl-app-ppo").parent == facts.folder / "trackio"
    assert [run.name for run in Api().runs("rl-app-ppo")] == ["my run"]
    *logs, last = SQLiteStorage.get_logs("rl-app-ppo", "my run")
    assert last["samples"]["_value"] == [CELLS]
    assert [(one["step"], one["val-core/s/acc/mean@4"]) for one in logs] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
