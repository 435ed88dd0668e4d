"""What the reward worker says of prompts, beside the columns that it writes."""

from __future__ import annotations

import asyncio

from rl_protocol import BatchData, ObjectColumn, ragged
from rl_protocol.rl_columns import prompt_partition
from rl_protocol.testing.memory_data_plane import MemoryDataPlane
from rl_trainer import ActorConfig, AlgorithmConfig, RewardSettings, RewardWorker, step_columns
from rl_trainer.config import OverlongConfig
from rl_trainer.rewards import InlineScorer
from rl_trainer.workers.messages import StageCall


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
