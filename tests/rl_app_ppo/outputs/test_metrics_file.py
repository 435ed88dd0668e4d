"""metrics.jsonl has one line per step."""

from __future__ import annotations

import json
import math

import pytest

from rl_app_ppo.outputs.metrics_file import JSONLSink, kept_metrics, more_metrics, read_metrics
from rl_protocol import ConfigError


def test_jsonl_is_there_line_by_line(tmp_path):
    sink = JSONLSink(tmp_path / "metrics.jsonl")
    sink.log(1, {"a": 1.5})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "a": 1.5}
    sink.log(2, {"a": 2.0})
    sink.close()
    sink.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_torn_last_line_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": NaN}\n{"step": 2, "a"')
    (line,) = read_metrics(path)
    assert math.isnan(line["a"])
    assert more_metrics(path, 0)[1] == len('{"step": 1, "a": NaN}\n')


@pytest.mark.parametrize("line", ["5", "null", '{"a": 1}', '{"step": 1, "a": "b"}', '{"step": "1"}', '{"step": 1e20}'])
def test_a_line_that_is_no_step_is_refused(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + line + "\n")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl can't be read: a line is not the metrics of a step: .+\.$"):
        read_metrics(path)
    with pytest.raises(ValueError, match="a line is not the metrics of a step"):
        more_metrics(path, 0)


def test_bytes_that_are_no_text_and_a_folder_are_refused(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\xff\n")
    for broken in (path, tmp_path):
        with pytest.raises(ConfigError, match="can't be read"):
            read_metrics(broken)


def test_a_file_that_is_cut_back_is_on_the_disk_before_it_replaces_the_old_one(tmp_path, monkeypatch):
    """Otherwise the file may be empty after a power loss, on file systems such as XFS."""
    path, flushed = tmp_path / "metrics.jsonl", list[tuple[str, int]]()
    path.write_text('{"step": 1}\n{"step": 2}\n')

    def fsync(flushed_path):
        flushed.append((flushed_path.name, len(path.read_text().splitlines())))

    monkeypatch.setattr("rl_app_ppo.outputs.metrics_file.fsync", fsync, raising=False)
    kept_metrics(path, 1)
    assert flushed == [(".metrics.jsonl", 2), (tmp_path.name, 1)]
