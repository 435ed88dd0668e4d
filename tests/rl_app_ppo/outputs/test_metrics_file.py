"""metrics.jsonl has one line per step."""

from __future__ import annotations

import json

from rl_app_ppo.outputs.metrics_file import JSONLSink


def test_jsonl_is_there_line_by_line(tmp_path):
    sink = JSONLSink(tmp_path / "metrics.jsonl")
    sink.log(1, {"a": 1.5})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "a": 1.5}
    sink.log(2, {"a": 2.0})
    sink.close()
    sink.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
