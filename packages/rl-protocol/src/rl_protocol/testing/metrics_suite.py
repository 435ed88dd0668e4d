"""Conformance suite of MetricSink: subclass it and override `open_sink` and `read`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from rl_protocol.ports import MetricSink

STEPS = (
    (1, {"actor/pg_loss": 0.25, "timing_s/step": 1.5}),
    (2, {"actor/pg_loss": -0.125}),
    (5, {"critic/score/mean": 0.0}),
)


class MetricSinkSuite:
    """Tests for a MetricSink."""

    def open_sink(self, folder: Path) -> MetricSink:
        """A fresh sink that writes into `folder`."""
        raise NotImplementedError

    def read(self, sink: MetricSink, folder: Path) -> Sequence[tuple[int, str, float]]:
        """(step, name, value) of everything that was logged, in any order; called after `close`."""
        raise NotImplementedError

    def test_what_was_logged_can_be_read(self, tmp_path: Path) -> None:
        sink = self.open_sink(tmp_path)
        for step, metrics in STEPS:
            sink.log(step, metrics)
        sink.close()
        got = sorted(self.read(sink, tmp_path))
        want = sorted((step, name, value) for step, metrics in STEPS for name, value in metrics.items())
        assert [entry[:2] for entry in got] == [entry[:2] for entry in want]
        assert [entry[2] for entry in got] == pytest.approx([entry[2] for entry in want])

    def test_the_callers_mapping_is_its_own(self, tmp_path: Path) -> None:
        sink = self.open_sink(tmp_path)
        metrics = {"a": 1.0}
        sink.log(1, metrics)
        assert metrics == {"a": 1.0}
        metrics["a"] = 2.0
        sink.close()
        assert [value for _, _, value in self.read(sink, tmp_path)] == [1.0]

    def test_no_metrics_and_a_second_close_are_legal(self, tmp_path: Path) -> None:
        sink = self.open_sink(tmp_path)
        sink.log(1, {})
        sink.close()
        sink.close()
        assert list(self.read(sink, tmp_path)) == []
