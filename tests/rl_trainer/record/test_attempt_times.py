"""A record of attempts whose clock was set back between them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_trainer.record.attempt_times import reading_order
from rl_trainer.record.read_record import RecordReader, read_record
from rl_trainer.record.record_file import DRIVER, SUFFIX, RecordFile
from rl_trainer.record.record_rows import CallRow, EndRow, RecordRow, SpanRow, StartRow, StepRow


def write(folder: Path, name: str, *rows: RecordRow) -> None:
    file = RecordFile(folder, name)
    file.append(rows)
    file.close()


def attempt(folder: Path, at: float, after: int, *steps: int, outcome: str) -> None:
    """An attempt with a step every second, and a call of a worker in each of them."""
    ends = [(at + i + 1, step) for i, step in enumerate(steps)]
    calls = [CallRow(at=end - 0.5, worker="actor", stage="update_actor") for end, _ in ends]
    spans = [SpanRow(at=end - 0.1, worker="actor", stage="update_actor", began=end - 0.5) for end, _ in ends]
    end = EndRow(at=at + len(steps) + 1, outcome=outcome, text="")
    write(folder, "actor", *(row for pair in zip(calls, spans, strict=True) for row in pair))
    write(folder, DRIVER, StartRow(at=at, after=after, steps=5), *(StepRow(at=a, step=s) for a, s in ends), end)


@pytest.mark.parametrize("back_s", [-100.0, 1.0, 1e6])
def test_the_attempt_that_began_later_is_the_later_one(tmp_path: Path, back_s: float) -> None:
    attempt(tmp_path, 1e9, 0, 1, 2, 3, outcome="failed")
    attempt(tmp_path, 1e9 + 4 - back_s, 2, 3, 4, 5, outcome="finished")
    record = read_record(tmp_path)
    assert [row.step for row in record.steps] == [1, 2, 3, 4, 5]
    assert [row.after for row in record.starts] == [0, 2]
    assert record.end is not None
    assert record.end.outcome == "finished"
    assert record.calls == []
    assert len(record.spans) == 6
    for rows in (record.starts, record.steps, record.spans):
        assert [row.at for row in rows] == sorted(row.at for row in rows)
    assert all(0 < span.at - span.began < 1 for span in record.spans)
    assert record.end.at - record.starts[0].at < 200


def test_a_record_that_is_followed_continues_with_the_next_attempt(tmp_path: Path) -> None:
    attempt(tmp_path, 1e9, 0, 1, 2, outcome="interrupted")
    reader = RecordReader(tmp_path)
    assert [row.step for row in reader.read().steps] == [1, 2]
    attempt(tmp_path, 1e9 - 500, 1, 2, 3, outcome="finished")
    record = reader.read()
    assert [row.step for row in record.steps] == [1, 2, 3]
    assert record.end is not None
    assert record.end.outcome == "finished"


def test_files_of_the_driver_come_first_and_in_the_order_of_attempts() -> None:
    names = [f"{name}{SUFFIX}" for name in ("actor", "driver.10", "driver.2", "driver", "reward")]
    ordered = sorted((Path(name) for name in names), key=reading_order)
    assert [path.name.removesuffix(SUFFIX) for path in ordered] == [
        "driver",
        "driver.2",
        "driver.10",
        "actor",
        "reward",
    ]
