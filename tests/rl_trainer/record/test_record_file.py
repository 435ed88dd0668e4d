"""Files of a record: growing, cut, written by killed processes, and without secrets."""

from __future__ import annotations

import gzip
import os
import signal
import subprocess
import sys

import pytest
from recorded import trajectory

from rl_trainer.record import record_file
from rl_trainer.record.read_record import read_record
from rl_trainer.record.record_file import RecordFile, read_blocks, read_file
from rl_trainer.record.record_rows import AlarmRow, EndRow, SpanRow, StartRow, StepRow


def write(folder, name, rows):
    file = RecordFile(folder, name)
    file.append(rows)
    file.close()
    file.append(rows)  # after the end: nothing
    file.close()


def test_rows_come_back_and_zcat_shows_them(tmp_path):
    rows = [StepRow(at=1.0, step=1), trajectory(1, "p/0/0", 2.0)]
    write(tmp_path / "record", "reward", rows)
    (path,) = (tmp_path / "record").iterdir()
    assert read_file(path)[0] == rows
    assert gzip.decompress(path.read_bytes()).startswith(b'{"type":"step"')


@pytest.mark.parametrize("lost", [1, 7, 20])
def test_a_torn_tail_is_left_out(tmp_path, lost):
    first, second = StepRow(at=1.0, step=1), StepRow(at=2.0, step=2)
    write(tmp_path, "a", [first])
    write(tmp_path, "b", [second])
    torn = (tmp_path / "a.jsonl.gz").read_bytes() + (tmp_path / "b.jsonl.gz").read_bytes()[:-lost]
    (tmp_path / "c").write_bytes(torn)
    assert read_file(tmp_path / "c")[0] == [first]


def test_blocks_that_are_longer_than_a_read_are_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(record_file, "_PIECE", 7)
    rows = [StepRow(at=float(step), step=step) for step in range(50)]
    for name, part in (("a", rows[:20]), ("b", rows[20:])):
        write(tmp_path, name, part)
    blocks = [(tmp_path / f"{name}.jsonl.gz").read_bytes() for name in "ab"]
    (tmp_path / "c").write_bytes(b"".join(blocks))
    ends = [len(blocks[0]), len(blocks[0]) + len(blocks[1])]
    assert list(read_blocks(tmp_path / "c")) == [(rows[:20], ends[0]), (rows[20:], ends[1])]
    assert read_file(tmp_path / "c", ends[0]) == (rows[20:], ends[1])


def test_a_second_attempt_writes_a_second_file(tmp_path):
    for step in (1, 2):
        write(tmp_path, "driver", [StepRow(at=float(step), step=step)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["driver.2.jsonl.gz", "driver.jsonl.gz"]
    assert [row.step for row in read_record(tmp_path).steps] == [1, 2]


def test_what_a_killed_process_wrote_is_readable(tmp_path):
    code = f"""
import sys, time
from pathlib import Path
from rl_trainer.record.record_file import RecordFile
from rl_trainer.record.record_rows import StepRow
file = RecordFile(Path({str(tmp_path)!r}), "worker")
for step in range(100000):
    file.append([StepRow(at=float(step), step=step)])
    time.sleep(0.001)
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        path = tmp_path / "worker.jsonl.gz"
        while not path.exists() or len(read_file(path)[0]) < 20:
            assert process.poll() is None
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait(60)
    steps = [row.step for row in read_file(path)[0]]
    assert steps == list(range(len(steps)))
    assert len(steps) >= 20


def test_values_of_secret_variables_are_not_written(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", 'sk-"planted"-é-1234')
    monkeypatch.setenv("DB_PASSWORD", "short")
    monkeypatch.setenv("PLAIN", "a plain value")
    write(tmp_path, "driver", [AlarmRow(at=1.0, name="reward", text='no sk-"planted"-é-1234, short, a plain value')])
    (path,) = tmp_path.iterdir()
    assert [row.text for row in read_file(path)[0]] == ["no [MY_API_KEY], short, a plain value"]


def test_a_resumed_run_replaces_the_steps_it_repeats(tmp_path):
    write(
        tmp_path,
        "driver",
        [
            StartRow(at=0.0, steps=9),
            *(StepRow(at=float(step), step=step) for step in (1, 2, 3)),
            EndRow(at=4.0, outcome="failed", text="x"),
            StartRow(at=10.0, after=2, steps=9),
            StepRow(at=11.0, step=3),
        ],
    )
    write(tmp_path, "reward", [trajectory(2, "a/0/0", 2.0), trajectory(3, "a/0/0", 3.0), trajectory(3, "b/0/0", 10.5)])
    record = read_record(tmp_path)
    assert [(row.step, row.at) for row in record.steps] == [(1, 1.0), (2, 2.0), (3, 11.0)]
    assert [(row.step, row.key) for row in record.trajectories] == [(2, "a/0/0"), (3, "b/0/0")]
    assert record.end is None


def test_a_file_that_can_not_be_written_ends_no_run(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    write(tmp_path / "file", "actor", [SpanRow(at=1.0, worker="actor", stage="x", began=0.0)])
    assert "the record of actor ends here" in caplog.text
