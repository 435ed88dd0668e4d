"""A language model as a judge: questions, scores, the cache, and what is no score."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sqlite3
import threading
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from rl_protocol import ConfigError
from rl_protocol.ports import Generation, SamplingParams
from rl_protocol.support.trusted_files import given_files, variables_for
from rl_trainer.rewards import Failure, Sample, Scored
from rl_trainer.rewards.scorer_toml import JudgeConfig, read_scorer_toml
from rl_trainer.rewards.services.judge import JudgeScorer
from rl_trainer.rewards.services.rubric import PLACES, question, verdict
from rl_trainer.rollout.serving import Endpoint, EndpointConfig, over_engine

KEY = "s3cret-of-the-judge"
RUBRIC = "Q: {prompt}\nA: {response}\nTruth: {ground_truth}. Say Score: 0 to 10."


def judge(**facts):
    return JudgeConfig(**{"url": "http://127.0.0.1:1/v1", "model": "judge", "rubric": RUBRIC, **facts})


def sample(response, prompt="2+2="):
    return Sample(data_source="d", solution_str=response, ground_truth="4", prompt_str=prompt, tokens=[1])


# -- questions and scores
@given(st.fixed_dictionaries({name: st.text() for name in PLACES}))
def test_a_question_has_each_text_once_whatever_is_in_it(texts):
    one = Sample(
        data_source=texts["data_source"],
        solution_str=texts["response"],
        ground_truth=texts["ground_truth"],
        prompt_str=texts["prompt"],
    )
    asked = question("{prompt}|{response}|{ground_truth}|{data_source}|{other}", one)
    assert asked == "|".join([*(texts[name] for name in PLACES), "{other}"])


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("Score: 7", 0.7),
        ("Good.\n**Score:** 7.5/10", 0.75),
        ("A score of 3 is too low; final score = 10", 1.0),
        ("score: 0", 0.0),
        ("SCORE 5", 0.5),
        ("Score (8): 2 mistakes", 0.8),
        ("Score (0-10): 8", 0.8),
        ("**Score (from 0 to 10)**: 8.5", 0.85),
    ],
)
def test_a_score_is_the_last_match_on_the_scale(answer, score):
    found = verdict(answer, judge())
    assert found == Scored(numbers={"acc": score, "score": score}, texts={"judgement": answer})


@pytest.mark.parametrize(
    ("answer", "facts", "why"),
    [
        ("It is good.", {}, "has no match of score_pattern: 'It is good.'"),
        ("", {}, "has no match of score_pattern"),
        ("Score: 11", {}, r"has score 11, which is not in 0\.\.10 \(lowest, highest\)"),
        ("Score: -1", {}, "has score -1, which is not in"),
        ("Score: good", {"score_pattern": r"Score: (\w+)"}, "has 'good' where score_pattern finds the score"),
        ("Score: 5", {"score_field": "score"}, "has no JSON object"),
        ('{"form": 5}', {"score_field": "score"}, r"has no number 'score' \(score_field\)"),
        ('{"score": true}', {"score_field": "score"}, "has no number 'score'"),
        ('{"score": 5, "form": 12}', {"score_field": "score"}, "has form 12, which is not in"),
        ('{"score": -1' + "0" * 400 + "}", {"score_field": "score"}, "has score -inf, which is not in"),
        ("Rated 5", {"score_pattern": r"Score: (\d+)|Rated \d+"}, "has no match of score_pattern"),
        ("[" * 100_000, {"score_field": "score"}, "has no JSON object"),
        ("{" * 100_000 + "}", {"score_field": "score"}, "has no JSON object"),
    ],
)
def test_an_answer_without_a_score_is_a_failure(answer, facts, why):
    found = verdict(answer, judge(**facts))
    assert isinstance(found, Failure)
    assert found.kind == "no_number"
    assert re.search(why, found.message), found.message


def test_the_fields_of_a_json_answer_are_numbers_of_the_reward():
    answer = 'Here:\n```json\n{"overall": 4, "form": 2, "why": "short", "passed": false}\n```'
    found = verdict(answer, judge(score_field="overall", lowest=1, highest=5))
    assert found == Scored(numbers={"acc": 0.75, "score": 0.75, "form": 0.25}, texts={"judgement": answer})


# -- over HTTP
class Model:
    """A server that answers a response `n` with `Score: n`, and anything else with `It is good.`"""

    def __init__(self):
        self.seen = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def answer(self, request):
        body = await request.json()
        self.seen.append(body)
        await self.gate.wait()
        said = body["messages"][0]["content"].split("A: ")[1].split("\n")[0]
        if said == "refused":
            return web.Response(status=400)
        if said == "empty":
            return web.json_response({"choices": []})
        if said == "odd":
            return web.json_response(["no completion"])
        text = f"Score: {said}" if said.isdecimal() else "It is good."
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": text}}]})


@asynccontextmanager
async def asking(limit_s=60.0, **facts):
    """Yield (model, scorer)."""
    model = Model()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", model.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    scorer = JudgeScorer(judge(url=f"http://127.0.0.1:{runner.addresses[0][1]}/v1", **facts), limit_s, {"K": KEY})
    try:
        yield model, scorer
    finally:
        await scorer.close()
        await scorer.close()
        await runner.cleanup()


def scores(outcomes):
    return [one.numbers["score"] if isinstance(one, Scored) else one.kind for one in outcomes]


def test_the_model_is_asked_once_for_equal_questions_and_its_answers_are_scores():
    async def run():
        async with asking(max_tokens=9, request={"response_format": {"type": "json_object"}}) as (model, scorer):
            outcomes = await scorer.score([sample("7"), sample("3"), sample("7"), sample("7", prompt="1+1=")])
            return model.seen, outcomes

    seen, outcomes = asyncio.run(run())
    assert scores(outcomes) == [0.7, 0.3, 0.7, 0.7]
    assert "cached" not in outcomes[0].numbers
    assert sorted(body["messages"][0]["content"] for body in seen) == [
        f"Q: {prompt}\nA: {response}\nTruth: 4. Say Score: 0 to 10."
        for prompt, response in [("1+1=", "7"), ("2+2=", "3"), ("2+2=", "7")]
    ]
    rest = {"max_tokens": 9, "model": "judge", "response_format": {"type": "json_object"}, "temperature": 0.0}
    assert all({name: body[name] for name in body if name != "messages"} == rest for body in seen)


def test_a_judge_that_gives_no_score_gives_no_score_of_0():
    async def run():
        async with asking(attempts=1) as (_, scorer):
            return await scorer.score([sample(one) for one in ("refused", "empty", "odd", "fine", "0")])

    outcomes = asyncio.run(run())
    assert scores(outcomes) == ["exception", "no_number", "no_number", "no_number", 0.0]
    said = [one.message for one in outcomes[:4]]
    assert said[0] == "was refused with status 400"
    assert said[1] == "answered with a chat completion without text"
    assert "not a chat completion" in said[2]
    assert said[3] == "the answer has no match of score_pattern: 'It is good.'"


def test_a_late_answer_is_a_timeout():
    async def run():
        async with asking(limit_s=0.2) as (model, scorer):
            model.gate.clear()
            outcomes = await scorer.score([sample("7")])
            model.gate.set()
            return outcomes

    assert asyncio.run(run()) == [
        Failure(kind="timeout", message="did not return within 0.2 s (JudgeScorer.timeout_s)")
    ]


def test_a_judge_has_a_time_limit_of_its_own():
    async def run(**limits):
        async with asking(**limits) as (model, scorer):
            model.gate.clear()
            asked = asyncio.create_task(scorer.score([sample("7")]))
            await asyncio.wait([asked], timeout=0.5)
            model.gate.set()
            return await asked

    def judged(own, all_rewards):
        (outcome,) = asyncio.run(run(limit_s=all_rewards, timeout_s=own))
        return outcome

    assert judged(0.2, 60.0) == Failure(kind="timeout", message="did not return within 0.2 s (timeout_s of its file)")
    assert scores([judged(60.0, 0.2)]) == [0.7]


def test_answers_with_a_score_are_kept_for_later_runs(tmp_path):
    cache = str(tmp_path / "answers.sqlite")

    async def run(responses, **facts):
        async with asking(cache=cache, attempts=1, **facts) as (model, scorer):
            outcomes = await scorer.score([sample(one) for one in responses])
            return (
                len(model.seen),
                scores(outcomes),
                [one.numbers["cached"] for one in outcomes if isinstance(one, Scored)],
            )

    first = ["7", "3", "fine"]
    assert asyncio.run(run(first)) == (3, [0.7, 0.3, "no_number"], [0.0, 0.0])
    assert asyncio.run(run([*first, "4"])) == (2, [0.7, 0.3, "no_number", 0.4], [1.0, 1.0, 0.0])
    assert asyncio.run(run(["5", "5", "fine", "fine"])) == (2, [0.5, 0.5, "no_number", "no_number"], [0.0, 1.0])
    assert asyncio.run(run(["7"], highest=14.0)) == (0, [0.5], [1.0])  # the scale is no part of the question
    for other in ({"model": "other"}, {"rubric": RUBRIC + "!"}, {"max_tokens": 3}, {"request": {"top_p": 0.5}}):
        assert asyncio.run(run(["7"], **other))[0] == 1
    # a pattern that finds no score in a kept answer asks again
    assert asyncio.run(run(["7"], score_pattern=r"Points: (\d+)")) == (1, ["no_number"], [])


def test_two_runs_share_a_cache(tmp_path):
    async def run():
        cache = str(tmp_path / "answers.sqlite")
        async with asking(cache=cache) as (_, one), asking(cache=cache) as (later, other):
            await one.score([sample(str(i)) for i in range(10)])
            outcomes = await other.score([sample(str(i)) for i in range(10)])
            return scores(outcomes), later.seen

    assert asyncio.run(run()) == ([i / 10 for i in range(10)], [])


def test_a_cache_that_can_not_be_used_ends_the_run_before_its_start(tmp_path):
    (tmp_path / "text").write_text("no database, and longer than a header of a database would be" * 10)
    with pytest.raises(ConfigError, match=r"cache='.*text' of a judge can't be used: file is not a database"):
        asyncio.run(_made(cache=str(tmp_path / "text")))


async def _made(**facts):
    JudgeScorer(judge(**facts), 1.0, {})


def test_a_cache_that_breaks_is_logged_and_the_judge_is_asked(tmp_path, caplog):
    cache = tmp_path / "answers.sqlite"

    async def run():
        async with asking(cache=str(cache)) as (model, scorer):
            with contextlib.closing(sqlite3.connect(cache)) as other:
                other.execute("DROP TABLE answers")
                other.commit()
            return scores(await scorer.score([sample("7")])), len(model.seen)

    assert asyncio.run(run()) == ([0.7], 1)
    assert "the cache of a judge's answers failed: no such table: answers" in caplog.text


def test_closing_ends_what_is_under_way():
    async def run():
        async with asking() as (model, scorer):
            model.gate.clear()
            task = asyncio.create_task(scorer.score([sample("7")]))
            while not model.seen:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await scorer.close()
            with pytest.raises(asyncio.CancelledError):
                await task
            model.gate.set()

    before = threading.active_count()
    asyncio.run(run())
    assert threading.active_count() <= before + 1


class Says:
    """An engine whose every answer is `Score: 7`."""

    weight_version = 1

    async def generate(self, requests, params):
        ids = tuple(b"Score: 7\x01")
        return [
            Generation(response_ids=ids, log_probs=(-0.5,) * len(ids), finish_reason="stop", weight_version=1)
            for _ in requests
        ]


class Bytes:
    """A tokenizer of bytes, with 1 as its end."""

    def prompt(self, messages):
        return json.dumps([[one.role, one.content] for one in messages])

    def encode(self, text):
        return list(text.encode())

    encode_rest = encode

    def decode(self, ids, *, special):
        return bytes(i for i in ids if special or i != 1).decode()


def test_the_endpoint_of_a_rollout_engine_can_be_the_judge():
    sampling = SamplingParams(max_new_tokens=64, temperature=0.5)
    config = EndpointConfig(model="judge", context=4000, sampling=sampling, key=(KEY * 2).encode())

    async def run():
        async with (
            Endpoint(config, Bytes()) as endpoint,
            endpoint.session((), over_engine(Says(), sampling, "judge")) as session,
        ):
            described = judge(url=session.base_url, temperature=0.5, max_tokens=64, key_variable="K")
            scorer = JudgeScorer(described, 60.0, {"K": KEY * 2})
            try:
                return await scorer.score([sample("4"), sample("5")])
            finally:
                await scorer.close()

    assert scores(asyncio.run(run())) == [0.7, 0.7]


# -- the file
def test_a_judge_is_described_by_a_file(tmp_path):
    path = tmp_path / "judge.toml"
    path.write_text(
        'kind = "judge"\nurl = "http://127.0.0.1:8000/v1"\nmodel = "m"\ncache = "a.sqlite"\nrubric = """\n{response}\n"""\n'
    )
    found = read_scorer_toml(str(path), variables_for(given_files([path], "trust")))
    assert found == JudgeConfig(
        url="http://127.0.0.1:8000/v1", model="m", rubric="{response}\n", cache=str(tmp_path / "a.sqlite")
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('url = "ftp://x"', "url must be http"),
        ('rubric = "{prompt}"', r"rubric must have \{response\}"),
        ('score_pattern = "("', "score_pattern is not a regular expression"),
        ('score_pattern = "7"', "score_pattern must have a group"),
        ("lowest = 10.0", "lowest must be less than highest; got 10.0 and 10.0"),
        ("max_tokens = 0", "max_tokens must be at least 1"),
        ("temperature = -1.0", "temperature must be at least 0"),
        ('cache = "nowhere/a.sqlite"', "must be in a folder that exists"),
        ("attempts = 0", "attempts must be at least 1"),
        ("timeout_s = -1.0", "timeout_s must be at least 0 and finite"),
        ("timeout_s = nan", "timeout_s must be at least 0 and finite"),
        ("timeout = 3", "unknown field `timeout`"),
    ],
)
def test_what_a_judge_can_not_be_is_named(tmp_path, line, message):
    facts = {"url": '"http://127.0.0.1:8000/v1"', "model": '"m"', "rubric": '"{response}"'}
    name, _, value = line.partition(" = ")
    path = tmp_path / "judge.toml"
    path.write_text('kind = "judge"\n' + "".join(f"{key} = {text}\n" for key, text in (facts | {name: value}).items()))
    with pytest.raises(ConfigError, match=message):
        read_scorer_toml(str(path), variables_for(given_files([path], "trust")))
