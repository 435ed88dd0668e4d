"""What the reward worker says of prompts, beside the columns that it writes."""

from __future__ import annotations

import asyncio

import pytest

from rl_protocol import BatchData, KVBatchMeta, ObjectColumn, RewardError, ragged
from rl_protocol.rl_columns import prompt_partition
from rl_protocol.testing.memory_data_plane import MemoryDataPlane
from rl_trainer import ActorConfig, AlgorithmConfig, RewardSettings, RewardWorker, step_columns
from rl_trainer.config import OverlongConfig
from rl_trainer.rewards import InlineScorer
from rl_trainer.rewards.scorer import Failure, Scored
from rl_trainer.workers.messages import StageCall
from rl_trainer.workers.scoring import ResponseScorer


def test_the_scores_of_a_prompt_are_those_of_what_the_policy_generated():
    """Its second response is the answer of the data, which is right."""

    async def work():
        plane, algorithm = MemoryDataPlane(), AlgorithmConfig(sft_coef=0.1)
        worker = RewardWorker(
            plane,
            step_columns(algorithm, ActorConfig()),
            InlineScorer(lambda source, text, truth, extra: float(text == truth)),
            lambda ids: str(ids[0]),
            RewardSettings(algorithm=algorithm, response_length=4),
        )
        facts = {"data_source": "s", "ground_truth": "8", "extra_info": {}}
        columns = {name: ObjectColumn.from_values([value]) for name, value in facts.items()}
        await plane.put(prompt_partition("train"), ["p"], BatchData({"prompts": ragged([[5]], "int64"), **columns}))
        data = {
            "responses": ragged([[7, 3], [8, 3]], "int64"),
            "demonstration": ragged([[False, False], [True, True]], "bool"),
        }
        batch = (await plane.put("train", ["p/0/0", "p/1/0"], BatchData(data))).without_tags()
        result = await worker.run("reward", StageCall(step=1, batch=batch))
        return result.prompt_scores, (await plane.get(batch, ["scores"])).dense("scores").values.tolist()

    prompts, scores = asyncio.run(work())
    assert scores == [0.0, 1.0]
    assert prompts == {"p": (0.0, 0.0)}


class CountedScorer:
    """Scores by a function; keeps the texts of each call."""

    def __init__(self, score, compares=False):
        self.reads_tokens, self.compares = False, compares
        self.calls = []
        self._scorer = InlineScorer(score)

    async def score(self, samples):
        self.calls.append([int(sample.solution_str) for sample in samples])
        return await self._scorer.score(samples)


def outcomes_of(scorer, rows, times=1, ahead=0):
    """Outcomes of so many responses `0`, `1`, ..., scored `times` times by one worker, the first
    time so many of them ahead.
    """
    keys = [f"p/{row}/0" for row in range(rows)]
    same = {"data_source": "s", "ground_truth": "", "extra_info": {}}
    columns = {name: ObjectColumn.from_values([value] * rows) for name, value in same.items()}
    data = BatchData({"responses": ragged([[row] for row in range(rows)], "int64"), **columns})
    responses = ResponseScorer(scorer, lambda ids: str(ids[0]), ())

    async def work():
        batch = KVBatchMeta(partition="train", keys=tuple(keys))
        if ahead:
            responses.begin(batch, data, range(ahead))
        return [await responses.score(batch, data, range(rows)) for _ in range(times)]

    return asyncio.run(work())


def test_a_function_that_always_fails_is_called_for_a_few_samples_of_the_batch():
    scorer = CountedScorer(lambda *_: None)
    with pytest.raises(
        RewardError, match=r"failed on all 16 samples that it got.* sample 'p/0/0' of 's' it returned None"
    ):
        outcomes_of(scorer, 160)
    assert scorer.calls == [list(range(0, 160, 10))]


def test_a_function_that_works_gets_each_sample_once_and_later_batches_whole():
    """It fails on the first 140 of 150 samples, as on a source of sorted data."""
    scorer = CountedScorer(lambda source, text, truth, extra: float(text) if int(text) >= 140 else None)
    for outcomes in outcomes_of(scorer, 150, times=2):
        assert [one.numbers["score"] for one in outcomes if isinstance(one, Scored)] == list(range(140, 150))
        assert [isinstance(one, Failure) for one in outcomes] == [True] * 140 + [False] * 10
    first, rest, again = scorer.calls
    assert len(first) == 16
    assert sorted(first + rest) == again == list(range(150))


def test_a_function_that_has_scored_responses_ahead_works():
    scorer = CountedScorer(lambda *_: 1.0)
    outcomes_of(scorer, 40, times=2, ahead=40)
    assert scorer.calls == [list(range(40))] * 2


def test_a_function_that_compares_responses_gets_all_of_a_batch():
    scorer = CountedScorer(lambda *_: 1.0, compares=True)
    outcomes_of(scorer, 40)
    assert scorer.calls == [list(range(40))]


def test_means_come_with_the_number_of_responses_that_they_are_of():
    """Three sessions of two sources; one of them has two trajectories, and one no `words`."""

    def score(source, text, truth, extra):
        return {"score": float(text)} if text == "9" else {"score": float(text), "words": 2.0}

    async def work():
        plane, algorithm = MemoryDataPlane(), AlgorithmConfig()
        worker = RewardWorker(
            plane,
            step_columns(algorithm, ActorConfig()),
            InlineScorer(score),
            lambda ids: str(ids[0]),
            RewardSettings(algorithm=algorithm, response_length=2, overlong=OverlongConfig(buffer_len=1)),
        )
        facts = {"data_source": ["s", "t"], "ground_truth": ["", ""], "extra_info": [{}, {}]}
        columns = {name: ObjectColumn.from_values(values) for name, values in facts.items()}
        prompts = BatchData({"prompts": ragged([[5], [6]], "int64"), **columns})
        await plane.put(prompt_partition("train"), ["p", "q"], prompts)
        data = BatchData({"responses": ragged([[7], [4], [8, 3], [9, 3]], "int64")})
        batch = await plane.put("train", ["p/0/0", "p/0/1", "p/1/0", "q/0/0"], data)
        return await worker.run("reward", StageCall(step=1, batch=batch.without_tags()))

    result = asyncio.run(work())
    assert result.sizes == {
        "reward/extra/words": 2,
        "reward/overlong_penalty/mean": 3,
        "source/s/score/mean": 2,
        "source/t/score/mean": 1,
    }
    assert result.metrics["source/s/score/mean"] == (4 + 8 - 1) / 2
    assert result.metrics["reward/extra/words"] == 2
