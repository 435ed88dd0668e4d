"""The in-memory implementations pass their suites; broken ones fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rl_protocol import BatchData, DenseColumn, RLError, WeightTensor
from rl_protocol.ports import CriticBackend, GenerationRequest, MetricSink, PolicyBackend, RolloutEngine, SamplingParams
from rl_protocol.testing.bigram_model import BigramCritic, BigramEngine, BigramPolicy, ListSink, letters
from rl_protocol.testing.metrics_suite import MetricSinkSuite
from rl_protocol.testing.reward_suite import RewardCase, RewardFunctionSuite
from rl_protocol.testing.rollout_suite import RolloutEngineSuite
from rl_protocol.testing.training_suite import CriticBackendSuite, PolicyBackendSuite


class TestBigramEngine(RolloutEngineSuite):
    make: Callable[[], RolloutEngine] = BigramEngine
    decode = staticmethod(letters)

    @contextmanager
    def open_engine(self) -> Iterator[tuple[RolloutEngine, Sequence[WeightTensor]]]:
        yield type(self).make(), list(BigramPolicy(seed=1).named_weights())


class TestBigramPolicy(PolicyBackendSuite):
    make: Callable[[], PolicyBackend] = BigramPolicy

    @contextmanager
    def open_policy(self) -> Iterator[PolicyBackend]:
        yield type(self).make()


class TestBigramCritic(CriticBackendSuite):
    make: Callable[[], CriticBackend] = BigramCritic

    @contextmanager
    def open_critic(self) -> Iterator[CriticBackend]:
        yield type(self).make()


class TestListSink(MetricSinkSuite):
    make: Callable[[], ListSink] = ListSink

    def open_sink(self, folder: Path) -> MetricSink:
        return type(self).make()

    def read(self, sink: MetricSink, folder: Path) -> list[tuple[int, str, float]]:
        assert isinstance(sink, ListSink)
        return [(step, name, value) for step, metrics in sink.records for name, value in metrics.items()]


def exact(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, object] | None = None
) -> float:
    return float(solution_str == ground_truth)


class TestExactReward(RewardFunctionSuite):
    cases = (RewardCase("s", "7", "7", 1.0), RewardCase("s", "8", "7", 0.0))
    function: Callable[..., Any] = staticmethod(exact)

    def reward(self) -> Any:
        return type(self).function


# --------------------------------------------------------------------------------
# broken implementations fail
class DropsOne(BigramEngine):
    async def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> Any:
        return (await super().generate(requests, params))[:-1]


class DependsOnTheBatch(BigramEngine):
    async def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> Any:
        return await super().generate(requests, msgspec.structs.replace(params, seed=params.seed + len(requests)))


class IgnoresTheSession(BigramEngine):
    async def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> Any:
        return await super().generate([msgspec.structs.replace(r, session=0) for r in requests], params)


class ActivatesBeforeItChecks(BigramEngine):
    def load_weights(self, weights: Iterable[WeightTensor], version: int) -> None:
        self._version = version
        super().load_weights(weights, version)


class LoadsNothing(BigramEngine):
    def load_weights(self, weights: Iterable[WeightTensor], version: int) -> None:
        table = self._table
        super().load_weights(weights, version)
        self._table = table


class AcceptsAnEmptyPrompt(BigramEngine):
    async def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> Any:
        return await super().generate(
            [msgspec.structs.replace(r, prompt_ids=r.prompt_ids or (2,)) for r in requests], params
        )


class ShiftedByOne(BigramPolicy):
    def compute_log_probs(self, batch: BatchData, *, temperature: float) -> BatchData:
        out = super().compute_log_probs(batch, temperature=temperature)
        rolled = dataclasses.replace(out.ragged("log_probs"), values=np.roll(out.ragged("log_probs").values, 1))
        return BatchData({**out.columns, "log_probs": rolled})


class DescendsInsteadOfClimbing(BigramPolicy):
    def __init__(self) -> None:
        super().__init__(learning_rate=-0.1)


class ReportsNumpy(BigramPolicy):
    def update(self, batch: BatchData, *, temperature: float) -> Any:
        return {name: np.float32(v) for name, v in super().update(batch, temperature=temperature).items()}


class ReturnsDenseValues(BigramCritic):
    def compute_values(self, batch: BatchData) -> BatchData:
        width = batch.ragged("responses").lengths.max(initial=0)
        return BatchData({"values": DenseColumn(np.zeros((len(batch), width), np.float32), "float32")})


class KeepsTheMapping(ListSink):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.records.append((step, metrics))  # type: ignore[arg-type]


class ForgetsSteps(ListSink):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.records = [(step, dict(metrics))]


def forgetful() -> Callable[..., Any]:
    seen: list[str] = []

    def reward(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
        seen.append(solution_str)
        return 1.0 if seen.count(solution_str) == 1 and solution_str == ground_truth else 0.0

    return reward


def numpy_reward(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> Any:
    return {"score": np.float32(solution_str == ground_truth)}


BROKEN: list[tuple[Any, Any, str]] = [
    (TestBigramEngine, DropsOne, "one_generation_per_request"),
    (TestBigramEngine, DependsOnTheBatch, "batches_and_order"),
    (TestBigramEngine, IgnoresTheSession, "chance_comes_from"),
    (TestBigramEngine, ActivatesBeforeItChecks, "missing_and_unknown"),
    (TestBigramEngine, ActivatesBeforeItChecks, "a_stream_that_breaks"),
    (TestBigramEngine, LoadsNothing, "new_weights_change"),
    (TestBigramEngine, AcceptsAnEmptyPrompt, "cannot_be_served"),
    (TestBigramPolicy, ShiftedByOne, "rows_do_not_influence"),
    (TestBigramPolicy, DescendsInsteadOfClimbing, "an_update_follows"),
    (TestBigramPolicy, ReportsNumpy, "an_update_follows"),
    (TestBigramCritic, ReturnsDenseValues, "one_value_per"),
    (TestListSink, KeepsTheMapping, "callers_mapping"),
    (TestListSink, ForgetsSteps, "what_was_logged"),
    (TestExactReward, forgetful(), "asking_again"),
    (TestExactReward, numpy_reward, "the_cases"),
]


@pytest.mark.parametrize(("suite", "broken", "test"), BROKEN, ids=lambda x: getattr(x, "__name__", x))
def test_what_breaks_a_port_fails_its_suite(suite: Any, broken: Any, test: str, tmp_path: Path) -> None:
    patched = type("Broken", (suite,), {"make": broken, "function": staticmethod(broken)})()
    (name,) = [n for n in dir(patched) if n.startswith("test_") and test in n]
    arguments = {"tmp_path": tmp_path, "advantage": 1.0}
    method = getattr(patched, name)
    wanted = method.__code__.co_varnames[1 : method.__code__.co_argcount]
    with pytest.raises((AssertionError, RLError, pytest.fail.Exception)):
        method(**{argument: arguments[argument] for argument in wanted})
