"""Responses are scored while others are generated, with the scores of one call for all."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from pump_world import BATCH, N, World

from rl_protocol import BatchData, KVBatchMeta, ObjectColumn, RewardError, ragged
from rl_protocol.rl_columns import prompt_partition
from rl_protocol.testing.memory_data_plane import MemoryDataPlane
from rl_trainer import ActorConfig, AlgorithmConfig, RewardWorker, step_columns
from rl_trainer.rewards.scorer import Failure, Scored
from rl_trainer.workers.messages import StageCall
from rl_trainer.workers.scoring import RewardSettings

KEYS = [f"p/{i}/0" for i in range(4)]


class Judge:
    """Scores a response with its number, fails on 8, and notes what it was asked."""

    reads_tokens = False

    def __init__(self, *, compares=False):
        self.compares, self.asked = compares, []

    async def score(self, samples):
        texts = [sample.solution_str for sample in samples]
        self.asked.append(texts)
        await asyncio.sleep(0)
        if "broken" in texts:
            raise RewardError("the judge is broken")
        return [
            Failure(kind="timeout", message="took too long")
            if sample.solution_str == "8"
            else Scored(numbers={"score": float(sample.solution_str), "acc": 1.0, "even": 0.5})
            for sample in samples
        ]


def rewarded(ahead, judge, *, changed=False, decode=str):
    """The result of `reward` and the scores, after `score_ahead` of these keys, one call each."""

    async def body():
        plane, algorithm = MemoryDataPlane(), AlgorithmConfig()
        facts = {"data_source": "s", "ground_truth": "", "extra_info": {}}
        prompt = {name: ObjectColumn.from_values([value]) for name, value in facts.items()}
        await plane.put(prompt_partition("train"), ["p"], BatchData({"prompts": ragged([[2]], "int64"), **prompt}))
        await plane.put("train", KEYS, BatchData({"responses": ragged([[6], [7], [8], [9]], "int64")}))
        settings = RewardSettings(algorithm=algorithm, response_length=4)
        columns = step_columns(algorithm, ActorConfig())
        worker = RewardWorker(plane, columns, judge, lambda ids: decode(ids[0]), settings)
        for keys in ahead:
            call = StageCall(step=1, batch=KVBatchMeta(partition="train", keys=tuple(keys)))
            await worker.run("score_ahead", call)
            await asyncio.sleep(0)
        if changed:
            await plane.put("train", KEYS[:1], BatchData({"responses": ragged([[5]], "int64")}))
        result = await worker.run("reward", StageCall(step=1, batch=KVBatchMeta(partition="train", keys=tuple(KEYS))))
        rows = await plane.list_rows("train", fields=["scores"])
        return result, (await plane.get(rows, ["scores"])).dense("scores").values.tolist()

    return asyncio.run(body())


@pytest.mark.parametrize("ahead", [[KEYS[:2]], [KEYS[1:3], KEYS[:1]], [KEYS]])
def test_the_scores_are_those_of_one_call_and_each_response_is_scored_once(ahead):
    judge = Judge()
    assert rewarded(ahead, judge) == rewarded([], Judge())
    asked = [text for call in judge.asked for text in call]
    assert sorted(asked) == ["6", "7", "8", "9"]
    assert judge.asked[0] == [{"p/0/0": "6", "p/1/0": "7", "p/2/0": "8", "p/3/0": "9"}[key] for key in ahead[0]]


def test_another_response_under_the_same_key_is_scored():
    judge = Judge()
    result, scores = rewarded([KEYS[:2]], judge, changed=True)
    assert judge.asked == [["6", "7"], ["5", "8", "9"]]
    assert scores == [5.0, 7.0, 9.0]
    assert result.failed == ("p/2/0",)
    ((uid, (mean, variance)),) = result.prompt_scores.items()
    assert (uid, mean, variance) == ("p", 7.0, pytest.approx(8 / 3))  # without the response that failed


def test_a_scorer_that_reads_prompts_has_them_ahead_too():
    class Reader(Judge):
        reads_tokens = True

        async def score(self, samples):
            self.asked.append([(sample.prompt_str, sample.solution_str, sample.tokens) for sample in samples])
            return [Scored(numbers={"score": 0.0, "acc": 0.0}) for _ in samples]

    judge = Reader()
    rewarded([KEYS[:2]], judge)
    assert judge.asked == [[("2", "6", [2, 6]), ("2", "7", [2, 7])], [("2", "8", [2, 8]), ("2", "9", [2, 9])]]


def test_a_scorer_that_compares_responses_gets_all_in_one_call():
    judge = Judge(compares=True)
    rewarded([KEYS[:2]], judge)
    assert judge.asked == [["6", "7", "8", "9"]]


def test_an_error_ahead_is_raised_by_the_stage_that_needs_the_score():
    with pytest.raises(RewardError, match="the judge is broken"):
        rewarded([KEYS[:1]], Judge(), decode=lambda token: "broken" if token == 6 else str(token))


@pytest.mark.parametrize("fails", [False, True])
def test_the_responses_of_one_replica_are_scored_while_another_generates(fails):
    """The second replica generates until the first one's responses are with the reward worker."""
    world = World(bound=0, steps=2, delays=[1], workers=2)
    generate, answer, scored = world.rollout, world.workers.reward.call, asyncio.Event()
    keys = []

    async def rollout(call):
        if call.partition.name == "train" and all(not prompt.lease.uid.endswith("-0") for prompt in call.prompts):
            await scored.wait()
        return await generate(call)

    async def reward(method, payload, *, timeout_s):
        if method == "score_ahead":
            keys.append(len(msgspec.msgpack.decode(payload, type=StageCall).batch.keys))
            scored.set()
            if fails:
                raise RewardError("not yet")
        return await answer(method, payload, timeout_s=timeout_s)

    world.rollout, world.workers.reward.call = rollout, reward
    world.fit()
    assert keys[0] == BATCH // 2 * N
    assert len(world.trained) == 2


def test_a_step_of_one_call_is_scored_in_one_call():
    world = World(bound=0, steps=2, delays=[0]).fit()
    assert world.calls["score_ahead"] == 0
    assert world.calls["reward"] == 2
