"""The log of scored validation responses."""

from __future__ import annotations

import json
import threading

from rl_trainer.rewards import Failure
from rl_trainer.workers.sample_log import SampleLog, SampleRow

ROW = SampleRow(
    key="v0/0/0",
    data_source="s",
    prompt="1+1=",
    response="3",
    ground_truth="2",
    outcome=Failure(kind="timeout", message="late"),
)


def test_a_table_can_be_read_back(tmp_path):
    log = SampleLog(tmp_path / "samples")
    log.write(3, [ROW, ROW])
    log.close()
    log.close()
    lines = (tmp_path / "samples" / "3.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert json.loads(lines[0])["outcome"] == {"type": "failure", "kind": "timeout", "message": "late"}
    assert json.loads(lines[0])["response"] == "3"
    assert "note" not in json.loads(lines[0])


def test_every_row_carries_what_a_reader_must_know(tmp_path):
    log = SampleLog(tmp_path, note="answers are written units first")
    log.write(3, [ROW, ROW])
    log.close()
    rows = [json.loads(line) for line in (tmp_path / "3.jsonl").read_text().splitlines()]
    assert [row["note"] for row in rows] == ["answers are written units first"] * 2


def test_a_slow_disk_does_not_block(tmp_path, monkeypatch, caplog):
    gate = threading.Event()
    log = SampleLog(tmp_path)
    write = SampleLog._write
    monkeypatch.setattr(SampleLog, "_write", lambda *args: (gate.wait(20), write(*args)))
    log.write(1, [ROW])
    log.write(2, [ROW])  # returns while the first write is blocked
    gate.set()
    log.close()
    assert [path.name for path in tmp_path.iterdir()] == ["1.jsonl"]
    assert "the samples of step 2 are left out" in caplog.text


def test_a_table_that_can_not_be_written_ends_no_run(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    log = SampleLog(tmp_path / "file")
    log.write(1, [ROW])
    log.close()
    assert "the samples of step 1 can't be written" in caplog.text
