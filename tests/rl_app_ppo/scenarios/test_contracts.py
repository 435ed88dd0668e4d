"""The app's sinks and rewards pass the suites of their ports."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from rl_app_ppo.outputs.metrics_file import JSONLSink
from rl_app_ppo.outputs.trackers import TensorBoardSink
from rl_protocol.ports import MetricSink, RewardFunction
from rl_protocol.testing.metrics_suite import MetricSinkSuite
from rl_protocol.testing.reward_suite import RewardCase, RewardFunctionSuite
from rl_trainer.rewards.functions import exact_match


class TestJSONL(MetricSinkSuite):
    def open_sink(self, folder: Path) -> MetricSink:
        return JSONLSink(folder / "metrics.jsonl")

    def read(self, sink: MetricSink, folder: Path) -> Sequence[tuple[int, str, float]]:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [(line["step"], name, value) for line in lines for name, value in line.items() if name != "step"]


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
class TestTensorBoard(MetricSinkSuite):
    def open_sink(self, folder: Path) -> MetricSink:
        return TensorBoardSink(folder)

    def read(self, sink: MetricSink, folder: Path) -> Sequence[tuple[int, str, float]]:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(folder)).Reload()
        return [(e.step, name, e.value) for name in events.Tags()["scalars"] for e in events.Scalars(name)]


class TestExactMatch(RewardFunctionSuite):
    cases = (
        RewardCase("arithmetic", "280", "280", 1.0),
        RewardCase("arithmetic", "28", "280", 0.0),
        RewardCase("arithmetic", "", "280", 0.0),
    )

    def reward(self) -> RewardFunction:
        return exact_match
