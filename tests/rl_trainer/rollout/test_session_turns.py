"""Sessions of several turns and trajectories: generation, seeds, scores and training."""

from __future__ import annotations

import asyncio
import re

import msgspec
import numpy as np
import pytest

from rl_protocol import BatchData, ConfigError, KeptSets, KVBatchMeta, ObjectColumn, RolloutError, RowKey, dense, ragged
from rl_protocol.batch.routed_experts import computed_tokens, fill_routed
from rl_protocol.ports import Generation, SamplingParams
from rl_protocol.rl_columns import prompt_partition
from rl_protocol.testing.memory_data_plane import MemoryDataPlane
from rl_trainer import (
    ActorConfig,
    AlgorithmConfig,
    OverlongConfig,
    PromptRow,
    RewardSettings,
    RewardWorker,
    step_columns,
)
from rl_trainer.algorithms.advantage_pipeline import AdvantageSettings, estimate_advantages
from rl_trainer.config import FilterGroupsConfig
from rl_trainer.rewards import InlineScorer
from rl_trainer.rollout.agents.transcript import Transcript
from rl_trainer.rollout.session_turns import SINGLE_TURN, SessionKind, SessionRef, Trajectory, run_sessions
from rl_trainer.workers.messages import StageCall
from rl_trainer.workers.scoring import final_rows

SAMPLING = SamplingParams(max_new_tokens=4)


class Echo:
    """An engine that repeats the last token of the context up to its budget."""

    weight_version = 7

    def __init__(self):
        self.calls = []

    async def generate(self, requests, params):
        self.calls.append(([(r.uid, r.session, r.prompt_ids) for r in requests], params.max_new_tokens))
        return [
            Generation(
                response_ids=(r.prompt_ids[-1],) * params.max_new_tokens,
                log_probs=(-0.5,) * params.max_new_tokens,
                finish_reason="length",
                weight_version=self.weight_version,
            )
            for r in requests
        ]


def refs(*lengths):
    return [
        SessionRef(f"p{i}", 0, PromptRow(prompt_ids=tuple(range(1, n + 1)), data_source="d", ground_truth=""))
        for i, n in enumerate(lengths)
    ]


def test_one_turn_is_one_call_for_all_sessions():
    engine = Echo()
    out = asyncio.run(run_sessions(SINGLE_TURN, refs(2, 3), engine, SAMPLING))
    assert out == [
        [
            Trajectory(
                response_ids=(n,) * 4,
                response_mask=(True,) * 4,
                log_probs=(-0.5,) * 4,
                weight_version=7,
                truncated=True,
            )
        ]
        for n in (2, 3)
    ]
    assert engine.calls == [([("p0", 0, (1, 2)), ("p1", 0, (1, 2, 3))], 4)]


@pytest.mark.parametrize(("reason", "truncated"), [("stop", False), ("length", True), ("abort", False)])
def test_only_a_response_that_ended_at_its_length_is_truncated(reason, truncated):
    one = Generation(response_ids=(1,), log_probs=(0.0,), finish_reason=reason, weight_version=0)
    assert Trajectory.of(one).truncated is truncated


async def as_many_turns_as_tokens(row, generate):
    """Each turn generates one token and observes a 9; the last turn starts a new context."""
    ids, made, context = [], [], list(row.prompt_ids)
    for _ in row.prompt_ids:
        answer = await generate(context, 1)
        ids += [*answer.response_ids, 9]
        made += [True, False]
        context += [*answer.response_ids, 9]
    first = Trajectory(
        response_ids=tuple(ids),
        response_mask=tuple(made),
        log_probs=(-0.5, 0.0) * len(row.prompt_ids),
        weight_version=7,
    )
    return [first, Trajectory.of(await generate(row.prompt_ids))]


def test_sessions_that_wait_are_served_together_and_every_turn_has_a_stream_of_its_own():
    engine = Echo()
    out = asyncio.run(run_sessions(SessionKind(as_many_turns_as_tokens), refs(1, 2), engine, SAMPLING))
    assert [len(trajectories) for trajectories in out] == [2, 2]
    assert out[1][0].response_ids == (2, 9, 9, 9)
    assert out[1][0].response_mask == (True, False, True, False)
    served = [([(uid, ids) for uid, _, ids in requests], budget) for requests, budget in engine.calls]
    assert served == [
        ([("p0", (1,)), ("p1", (1, 2))], 1),
        ([("p1/turn1", (1, 2, 2, 9))], 1),  # other budget, other call
        ([("p0/turn1", (1,))], 4),
        ([("p1/turn2", (1, 2))], 4),
    ]


TRUNCATED = SamplingParams(max_new_tokens=4, top_k=2, kept_sets=True)


class KeepsTwo(Echo):
    """Reports that token 9 and the sampled one were kept; `wrong` reports others."""

    def __init__(self, *, wrong=False):
        super().__init__()
        self._wrong = wrong

    async def generate(self, requests, params):
        return [
            msgspec.structs.replace(
                made, kept=KeptSets.from_ids([(3, 9) if self._wrong else (token, 9) for token in made.response_ids], 99)
            )
            for made in await super().generate(requests, params)
        ]


def test_a_trajectory_of_several_turns_keeps_the_sets_of_its_own_tokens():
    async def session(row, generate):
        transcript = Transcript(row.prompt_ids, generate)
        await transcript.turn(1)
        transcript.observe([5, 6])
        await transcript.turn(1)
        return [transcript.trajectory()]

    ((trajectory,),) = asyncio.run(run_sessions(SessionKind(session), refs(2), KeepsTwo(), TRUNCATED))
    assert trajectory.response_ids == (2, 5, 6, 6)
    assert trajectory.kept.counts.tolist() == [2, 0, 0, 2]
    assert trajectory.kept.words.tolist() == [2, 9, 6, 9]


ROUTED = SamplingParams(max_new_tokens=4, routed_experts=True)


class Routes(Echo):
    """Reports for each token the number of the call that computed it, of `less` tokens too few."""

    def __init__(self, less=0):
        super().__init__()
        self._less, self._calls = less, 0

    async def generate(self, requests, params):
        self._calls += 1
        out = []
        for request, made in zip(requests, await super().generate(requests, params), strict=True):
            tokens = len(request.prompt_ids) + len(made.response_ids) - 1 - self._less
            out.append(msgspec.structs.replace(made, routed=np.full((tokens, 1, 1), self._calls, np.int16)))
        return out


def test_a_trajectory_of_several_turns_joins_the_experts_of_its_tokens():
    """What the first turn has computed stays, and the last token has none."""

    async def session(row, generate):
        transcript = Transcript(row.prompt_ids, generate)
        await transcript.turn(1)
        transcript.observe([5, 6])
        await transcript.turn(2)
        transcript.observe([7])
        return [transcript.trajectory()]

    (one,) = refs(3)
    params = msgspec.structs.replace(ROUTED, max_new_tokens=9)
    ((trajectory,),) = asyncio.run(run_sessions(SessionKind(session), [one], Routes(), params))
    prompt, made = len(one.row.prompt_ids), len(trajectory.response_ids)
    assert made == 6
    # prompt | 1 token of turn 1, 2 observed, 2 of turn 2 without the last | the last observation
    assert trajectory.routed.ravel().tolist() == [1] * prompt + [2] * 4
    with_end = fill_routed(trajectory.routed, computed_tokens(prompt, made))
    assert with_end.ravel().tolist() == [1] * prompt + [2] * 4 + [-1]


def test_experts_that_are_missing_are_an_error():
    (failure,) = asyncio.run(run_sessions(SINGLE_TURN, refs(2), Routes(less=1), ROUTED))
    assert "and the rollout engine reports the experts of" in str(failure)
    assert "AlgorithmConfig.router_replay=disabled" in str(failure)

    async def own_trajectory(row, generate):
        made = await generate(row.prompt_ids)
        ids = made.response_ids
        return [
            Trajectory(response_ids=ids, response_mask=(True,) * len(ids), log_probs=made.log_probs, weight_version=7)
        ]

    (failure,) = asyncio.run(run_sessions(SessionKind(own_trajectory), refs(2), Routes(), ROUTED))
    assert "has no routed experts; Trajectory.routed must join Generation.routed" in str(failure)


def test_sets_that_lack_a_token_or_are_missing_are_an_error():
    async def own_trajectory(row, generate):
        made = await generate(row.prompt_ids)
        return [
            Trajectory(
                response_ids=made.response_ids, response_mask=(True,) * 4, log_probs=made.log_probs, weight_version=7
            )
        ]

    (failure,) = asyncio.run(run_sessions(SessionKind(own_trajectory), refs(2), KeepsTwo(), TRUNCATED))
    assert "has 4 tokens, and kept sets of 0; with top_p or top_k Trajectory.kept must join" in str(failure)
    (failure,) = asyncio.run(run_sessions(SINGLE_TURN, refs(2), KeepsTwo(wrong=True), TRUNCATED))
    assert "token 0 after the prompt is not in the set that it was sampled from" in str(failure)
    (failure,) = asyncio.run(run_sessions(SINGLE_TURN, refs(2), Echo(), TRUNCATED))
    assert "kept sets of 0" in str(failure)


@pytest.mark.parametrize(
    ("trajectories", "message"),
    [
        ([], "Session 0 of prompt 'p0' has no trajectory"),
        (
            [Trajectory(response_ids=(1,) * 5, response_mask=(True,) * 5, log_probs=(0.0,) * 5, weight_version=0)],
            "more than",
        ),
        (
            [Trajectory(response_ids=(1, 2), response_mask=(True,), log_probs=(0.0, 0.0), weight_version=0)],
            "must align",
        ),
    ],
)
def test_sessions_that_cannot_be_trained_on_are_named(trajectories, message):
    async def session(row, generate):
        return trajectories

    (failure,) = asyncio.run(run_sessions(SessionKind(session), refs(1), Echo(), SAMPLING))
    assert isinstance(failure, RolloutError)
    assert message in str(failure)


class Updated:
    """An engine whose weights change during its first calls, after one token of each response."""

    weight_version = 0

    def __init__(self, updates):
        self.updates, self.budgets = updates, []

    async def generate(self, requests, params):
        version, self.weight_version = self.weight_version, min(self.weight_version + 1, self.updates)
        self.budgets.append(params.max_new_tokens)
        made = 1 if version < self.weight_version else params.max_new_tokens
        reason = "abort" if version < self.weight_version else "length"
        return [
            Generation(
                response_ids=(10 * version + len(request.prompt_ids),) * made,
                log_probs=(-float(version),) * made,
                finish_reason=reason,
                weight_version=version,
            )
            for request in requests
        ]


def test_new_weights_continue_a_response_after_the_tokens_that_it_has():
    engine = Updated(updates=2)
    ((one,), (other,)) = asyncio.run(run_sessions(SINGLE_TURN, refs(2, 3), engine, SAMPLING))
    assert engine.budgets == [4, 3, 2]
    assert one.response_ids == (2, 13, 24, 24)
    assert other.response_ids == (3, 14, 25, 25)
    assert one.log_probs == (0.0, -1.0, -2.0, -2.0)
    assert one.versions == ((0, 1), (1, 1), (2, 2))
    assert (one.weight_version, one.newest_version, one.truncated) == (0, 2, True)


def test_an_update_that_comes_with_the_last_token_leaves_a_whole_response():
    sampling = SamplingParams(max_new_tokens=1)
    ((one,),) = asyncio.run(run_sessions(SINGLE_TURN, refs(2), Updated(updates=1), sampling))
    assert (one.response_ids, one.weight_version, one.truncated) == ((2,), 0, True)


def test_new_weights_start_a_response_again():
    engine = Updated(updates=2)
    out = asyncio.run(run_sessions(SINGLE_TURN, refs(2), engine, SAMPLING, restart=True))
    assert engine.budgets == [4, 4, 4]
    assert out == [
        [
            Trajectory(
                response_ids=(22,) * 4,
                response_mask=(True,) * 4,
                log_probs=(-2.0,) * 4,
                weight_version=2,
                truncated=True,
            )
        ]
    ]


def test_a_session_that_hides_the_update_starts_again_too():
    """It catches every error, asks again and returns something else."""
    begun = []

    async def session(row, generate):
        begun.append(row)
        try:
            return [Trajectory.of(await generate(row.prompt_ids))]
        except RolloutError:
            with pytest.raises(RolloutError, match="starts again"):
                await generate(row.prompt_ids)
            return [Trajectory(response_ids=(5,), response_mask=(True,), log_probs=(0.0,), weight_version=0)]

    engine = Updated(updates=1)
    ((one,),) = asyncio.run(run_sessions(SessionKind(session), refs(2), engine, SAMPLING, restart=True))
    assert (len(begun), one.response_ids, one.weight_version) == (2, (12,) * 4, 1)


def test_requests_that_a_session_makes_at_once_are_sent_with_those_of_the_others():
    engine = Echo()

    async def run(row, generate):
        if len(row.prompt_ids) == 2:
            several = await asyncio.gather(*(generate(row.prompt_ids) for _ in range(3)))
            return [Trajectory.of(one) for one in several]
        for _ in range(10):  # the requests of the other session are there first
            await asyncio.sleep(0)
        return [Trajectory.of(await generate(row.prompt_ids))]

    ended = asyncio.run(run_sessions(SessionKind(run), refs(2, 3), engine, SAMPLING))
    assert [len(one) for one in ended] == [3, 1]
    ((sent, _),) = engine.calls
    assert [uid for uid, *_ in sent] == ["p0", "p0/turn1", "p0/turn2", "p1"]


def test_a_request_that_its_session_leaves_behind_is_not_sent():
    engine, left = Echo(), []

    async def run(row, generate):
        if len(row.prompt_ids) == 2:
            left.append(asyncio.ensure_future(generate(row.prompt_ids)))
            await asyncio.sleep(0)
            return [Trajectory(response_ids=(5,), response_mask=(False,), log_probs=(0.0,), weight_version=0)]
        return [Trajectory.of(await generate(row.prompt_ids))]

    async def body():
        await run_sessions(SessionKind(run), refs(2, 3), engine, SAMPLING)
        await asyncio.wait(left)

    asyncio.run(body())
    assert left[0].cancelled()
    assert engine.calls == [([("p1", 0, (1, 2, 3))], 4)]


def test_a_session_that_raises_fails_alone_and_names_the_place():
    async def session(row, generate):
        generation = await generate(row.prompt_ids)
        if len(row.prompt_ids) == 2:
            raise ValueError("no answer from the tool")
        return [Trajectory.of(generation), Trajectory.of(await generate(row.prompt_ids))]

    good, bad, last = asyncio.run(run_sessions(SessionKind(session), refs(1, 2, 3), Echo(), SAMPLING))
    assert (len(good), len(last)) == (2, 2)
    assert isinstance(bad, RolloutError)
    assert re.search(
        r"prompt 'p1' raised ValueError: no answer from the tool \(.*test_session_turns.py:\d+\)", str(bad)
    )


@pytest.mark.parametrize(("returned", "got"), [(None, "None"), (["text"], r"\['text'\]"), (3, "3")])
def test_a_session_that_returns_no_list_of_trajectories_is_named(returned, got):
    async def session(row, generate):
        return returned

    (bad,) = asyncio.run(run_sessions(SessionKind(session), refs(1), Echo(), SAMPLING))
    assert isinstance(bad, RolloutError)
    assert re.search(rf"prompt 'p0' returned {got}; its function must return a list of Trajectory\.", str(bad))


def test_a_session_whose_exception_has_no_message_fails_alone():
    class MuteError(Exception):
        def __str__(self):
            return self.reason

    async def session(row, generate):
        raise MuteError

    (bad,) = asyncio.run(run_sessions(SessionKind(session), refs(1), Echo(), SAMPLING))
    assert "raised MuteError: its __str__ raised AttributeError (" in str(bad)


def test_a_wrong_configuration_is_no_failure_of_a_session():
    async def session(row, generate):
        return generate.tokenizer

    with pytest.raises(ConfigError, match="must be given a tokenizer"):
        asyncio.run(run_sessions(SessionKind(session), refs(1, 1), Echo(), SAMPLING))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RolloutError("no memory"), "^no memory$"),
        (MemoryError("40 GiB"), r"The rollout engine raised MemoryError: 40 GiB \(.*test_session_turns.py:\d+\)"),
    ],
)
def test_an_engine_that_fails_ends_all_sessions(error, message):
    class Broken(Echo):
        async def generate(self, requests, params):
            raise error

    async def body():
        async with asyncio.timeout(30):
            await run_sessions(SINGLE_TURN, refs(1, 1, 1), Broken(), SAMPLING)

    with pytest.raises(RolloutError, match=message):
        asyncio.run(body())


class Slow(Echo):
    """An engine that answers once it is released."""

    def __init__(self):
        super().__init__()
        self.asked, self.released = asyncio.Event(), asyncio.Event()

    async def generate(self, requests, params):
        self.asked.set()
        await self.released.wait()
        return await super().generate(requests, params)


@pytest.mark.parametrize("sent", [False, True], ids=["before it is sent", "while it is generated"])
def test_a_session_that_cancels_its_request_does_not_hold_up_the_others(sent):
    engine, cancelled = Slow(), asyncio.Event()

    async def run(row, generate):
        name = row.prompt_ids[-1]
        if name == 2:
            request = asyncio.ensure_future(generate(row.prompt_ids))
            await (engine.asked.wait() if sent else asyncio.sleep(0))
            request.cancel()
            await asyncio.wait([request])
            engine.released.set()
            cancelled.set()
        elif name == 3 and not sent:
            await cancelled.wait()
        return [Trajectory.of(await generate(row.prompt_ids))]

    async def main():
        async with asyncio.timeout(60):
            return await run_sessions(SessionKind(run), refs(2, 3, 4), engine, SAMPLING)

    ended = asyncio.run(main())
    assert [one.response_ids for (one,) in ended] == [(2,) * 4, (3,) * 4, (4,) * 4]


def test_an_engine_that_leaves_out_a_response_ends_all_sessions():
    class LeavesOne(Echo):
        async def generate(self, requests, params):
            return (await super().generate(requests, params))[1:]

    with pytest.raises(RolloutError, match=r"The rollout engine returned 1 generation for 2 requests\."):
        asyncio.run(asyncio.wait_for(run_sessions(SINGLE_TURN, refs(2, 3), LeavesOne(), SAMPLING), 60))


def test_the_row_that_is_scored_is_the_last_of_its_session():
    keys = ["a/0/1", "a/0/0", "a/1/0", "b/0/0", "b/0/10", "b/0/2"]
    assert [keys[i] for i in final_rows(keys)] == ["a/0/1", "a/0/1", "a/1/0", "b/0/10", "b/0/10", "b/0/10"]


async def scored(algorithm, responses, reward, overlong=None):
    """Store trajectories {key: tokens} and score them; return plane, worker, call and result."""
    plane, keys = MemoryDataPlane(), list(responses)
    uids = list(dict.fromkeys(RowKey.parse(key).uid for key in keys))
    prompts = {"prompts": ragged([[2]] * len(uids), "int64")}
    named = {
        name: ObjectColumn.from_values([value] * len(uids))
        for name, value in (("data_source", "data_source"), ("ground_truth", "ground_truth"), ("extra_info", {}))
    }
    await plane.put(prompt_partition("train"), uids, BatchData(prompts | named))
    batch = await plane.put("train", keys, BatchData({"responses": ragged(list(responses.values()), "int64")}))
    worker = RewardWorker(
        plane,
        step_columns(algorithm, ActorConfig()),
        InlineScorer(reward),
        lambda ids: " ".join(map(str, ids)),
        RewardSettings(algorithm=algorithm, response_length=4, overlong=overlong or OverlongConfig()),
    )
    call = StageCall(step=1, batch=KVBatchMeta(partition="train", keys=batch.keys))
    result = await worker.run("reward", call)
    return plane, worker, call, result


def length_of(source, text, truth, extra=None):
    return {"score": float(len(text.split())), "acc": float(text.startswith("5"))}


def test_the_score_of_the_last_trajectory_is_that_of_the_session_and_overlong_ones_pay():
    responses = {"a/0/0": [1], "a/0/1": [5, 5, 5], "a/1/0": [5, 1], "b/0/0": [1, 2, 3, 4]}

    async def body():
        plane, _, call, result = await scored(
            AlgorithmConfig(), responses, length_of, OverlongConfig(buffer_len=2, penalty_factor=0.5)
        )
        got = await plane.get(call.batch, ["scores", "acc"])
        # 3 of 4 tokens are halfway into the buffer of 2; 4 tokens fill it.
        assert got.dense("scores").values.tolist() == [3 - 0.25, 3 - 0.25, 2.0, 4 - 0.5]
        assert got.dense("acc").values.tolist() == [1.0, 1.0, 1.0, 0.0]
        assert result.metrics["reward/overlong_penalty/min"] == -0.5
        assert result.metrics["reward/overlong_penalty/mean"] == pytest.approx(-0.25)

    asyncio.run(body())


@pytest.mark.parametrize(("metric", "kept"), [("acc", ("b",)), ("score", ("a", "b"))])
def test_the_filter_names_prompts_whose_sessions_differ(metric, kept):
    responses = {"a/0/0": [5, 1], "a/1/0": [5], "b/0/0": [1], "b/1/0": [7], "b/1/1": [5, 5], "c/0/0": [1], "c/1/0": [2]}
    algorithm = AlgorithmConfig(filter_groups=FilterGroupsConfig(enable=True, metric=metric))

    async def body():
        _, worker, call, _ = await scored(algorithm, responses, length_of)
        assert (await worker.run("filter", call)).uids == kept

    asyncio.run(body())


def test_batch_metrics_count_a_session_once():
    keys = ("a/0/0", "a/0/1", "a/1/0")
    offsets = [[3, 3], [4], [5]]
    columns = {
        "prompts": ragged([[2]] * 3, "int64"),
        "responses": ragged(offsets, "int64"),
        "response_mask": ragged([[True, True], [True], [True]], "bool"),
        "old_log_probs": ragged([[-1.0, -1.0], [-1.0], [-1.0]], "float32"),
        "rollout_log_probs": ragged([[-1.0, -1.0], [-1.0], [-1.0]], "float32"),
        "entropy": ragged([[1.0, 1.0], [1.0], [1.0]], "float32"),
    }
    columns |= {name: dense(np.array([1.0, 1.0, 0.0], np.float32)) for name in ("scores", "acc")}
    scoring = AdvantageSettings(
        algorithm=AlgorithmConfig(),
        policy_loss=ActorConfig().policy_loss,
        response_length=4,
        kl_coef=0.0,
        rng=np.random.default_rng(0),
    )
    out, metrics, *_ = estimate_advantages(KVBatchMeta(partition="train", keys=keys), BatchData(columns), scoring)
    assert metrics["critic/score/mean"] == 0.5
    a = out.ragged("advantages")
    assert a.row(0).tolist() == [a.row(1)[0]] * 2 == [-a.row(2)[0]] * 2
