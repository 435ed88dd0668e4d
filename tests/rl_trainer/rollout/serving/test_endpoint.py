"""The endpoint over urllib, raw sockets and a process: answers, errors, updates, hang-ups."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import sys
import urllib.error
import urllib.request
from contextlib import asynccontextmanager

import numpy as np
import pytest
from replay_buffers import leased

from rl_protocol import ConfigError, KVBatchMeta, RolloutError
from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.ports import Generation, GenerationRequest, SamplingParams
from rl_protocol.rl_columns import TRAIN_PARTITION
from rl_protocol.testing.bigram_model import CONTEXT, WEIGHT, BigramEngine, initial_table, log_softmax
from rl_protocol.testing.memory_data_plane import MemoryDataPlane
from rl_trainer import PromptRow, RolloutWorker
from rl_trainer.rollout.partial_generation import MAX_ABORTS
from rl_trainer.rollout.serving import Endpoint, EndpointConfig, agent_session, over_engine
from rl_trainer.workers.messages import Partition, RolloutCall

KEY = "k" * 32
SAMPLING = SamplingParams(max_new_tokens=6, seed=3)
SPELLING = "_.cdeggh"  # 5 and 6 are both spelled g, so encoded text may have other tokens
DEADLINE_S = 60.0


class Letters:
    """A tokenizer with one letter per token; in a chat, assistant turns end with a full stop."""

    def prompt(self, messages):
        return "".join(m.content + ("." if m.role == "assistant" else "") for m in messages)

    def encode(self, text):
        return [SPELLING.index(letter) for letter in text]

    encode_rest = encode

    def decode(self, ids, *, special):
        return "".join(SPELLING[i] for i in ids if special or i != 1)


class Gated(BigramEngine):
    """An engine with a gate: requests wait while it is closed.

    `waiting` is set when a request arrives, `gone` when one is cancelled. The next `aborts` answers
    are cut to one token, as by a weight update.
    """

    def __init__(self):
        super().__init__(decode=lambda ids: Letters().decode(ids, special=False))
        self.open, self.waiting, self.gone, self.asked = asyncio.Event(), asyncio.Event(), asyncio.Event(), []
        self.open.set()
        self.aborts = 0

    async def generate(self, requests, params):
        self.asked += [(r, params) for r in requests]
        self.waiting.set()
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.gone.set()
            raise
        made = await super().generate(requests, params)
        if self.aborts:
            self.aborts -= 1
            made = [
                Generation(
                    response_ids=g.response_ids[:1],
                    log_probs=g.log_probs[:1],
                    finish_reason="abort",
                    weight_version=g.weight_version,
                )
                for g in made
            ]
            self.new_weights(self.weight_version + 1)
        return made

    def new_weights(self, version):
        table = initial_table(version)
        self.load_weights([WeightTensor(WEIGHT, "float32", table.shape, table.reshape(-1).view(np.uint8))], version)


@asynccontextmanager
async def serving(prompt=(2, 3), tokenizer=None, **settings):
    """Yield (engine, session)."""
    engine = Gated()
    config = EndpointConfig(
        **{"model": "bigram", "context": CONTEXT, "sampling": SAMPLING, "key": KEY.encode(), **settings}
    )
    policy = over_engine(engine, config.sampling, "p7")
    async with (
        asyncio.timeout(DEADLINE_S),
        Endpoint(config, tokenizer) as endpoint,
        endpoint.session(prompt, policy) as one,
    ):
        yield engine, one


def post_now(url, body, key=KEY, headers=()):
    request = urllib.request.Request(url, json.dumps(body).encode(), method="POST")
    request.add_header("Authorization", f"Bearer {key}")
    for name, value in dict(headers).items():
        request.add_header(name, value)
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


async def post(session, path, body, **more):
    """Return (status, decoded answer)."""
    status, text = await asyncio.to_thread(post_now, f"{session.base_url}/{path}", {"model": "bigram", **body}, **more)
    return status, json.loads(text)


# -- answers
def test_a_completion_of_token_ids_is_answered_with_token_ids_and_recorded():
    async def body():
        async with serving() as (_, session):
            status, answer = await post(
                session, "completions", {"prompt": [2, 3], "max_tokens": 5, "logprobs": 0, "return_token_ids": True}
            )
            (expected,) = await BigramEngine().generate(
                [GenerationRequest(uid="p7", session=0, prompt_ids=(2, 3))],
                SamplingParams(max_new_tokens=5, seed=3),
            )
            return status, answer, expected, session.recorder.trajectories()

    status, answer, expected, (recorded,) = asyncio.run(body())
    assert status == 200
    (choice,) = answer["choices"]
    assert tuple(choice["token_ids"]) == expected.response_ids
    assert choice["prompt_token_ids"] == [2, 3]
    assert tuple(choice["logprobs"]["token_logprobs"]) == expected.log_probs
    assert choice["logprobs"]["tokens"][0] == f"token_id:{expected.response_ids[0]}"
    assert (choice["finish_reason"], choice["weight_version"]) == (expected.finish_reason, 0)
    assert answer["usage"]["total_tokens"] == 2 + len(expected.response_ids)
    assert recorded.response_ids == expected.response_ids
    assert recorded.log_probs == expected.log_probs
    assert all(recorded.response_mask)


def test_a_conversation_in_words_is_one_trajectory_of_the_tokens_that_were_made():
    async def body():
        async with serving(tokenizer=Letters(), sampling=SamplingParams(max_new_tokens=6, seed=11)) as (_, session):
            talk, made = [{"role": "user", "content": "cd"}], []
            for _ in range(3):
                status, answer = await post(
                    session, "chat/completions", {"messages": talk, "return_token_ids": True, "logprobs": True}
                )
                assert status == 200, answer
                (choice,) = answer["choices"]
                made.append(choice)
                if choice["finish_reason"] == "stop":
                    assert not choice["message"]["content"].endswith(".")
                talk += [choice["message"], {"role": "user", "content": "h"}]
            return answer["prompt_token_ids"], made, session.recorder.trajectories()

    context, made, trajectories = asyncio.run(body())
    # encoded text would have 5
    assert 6 in [token for choice in made for token in choice["token_ids"]]
    (one,) = trajectories
    assert (2, 3, *one.response_ids) == (*context, *made[-1]["token_ids"])
    kept = [token for token, own in zip(one.response_ids, one.response_mask, strict=True) if own]
    assert kept == [token for choice in made for token in choice["token_ids"]]
    for choice in made:
        assert [part["token"] for part in choice["logprobs"]["content"]] == [
            SPELLING[token] for token in choice["token_ids"]
        ]


def test_a_turn_that_the_agent_shortens_is_no_observation_and_the_answer_to_it_is_one():
    """As templates do that leave out what the policy thought in earlier turns."""

    async def body():
        async with serving(tokenizer=Letters(), sampling=SamplingParams(max_new_tokens=6, seed=11)) as (_, session):
            talk = [{"role": "user", "content": "cd"}]
            assert (await post(session, "chat/completions", {"messages": talk}))[0] == 200
            talk += [{"role": "assistant", "content": "eee"}, {"role": "user", "content": "hd"}]
            assert (await post(session, "chat/completions", {"messages": talk}))[0] == 200
            return session.recorder.trajectories()

    first, second = asyncio.run(body())
    made = len(second.response_ids) - 6
    assert second.response_ids[:6] == (4, 4, 4, 1, 7, 3)  # eee.hd
    assert second.observations == (False,) * 4 + (True,) * 2 + (False,) * made
    assert not any(first.observations)


def test_n_choices_differ_are_reproducible_and_each_is_a_trajectory():
    async def body(seed):
        async with serving() as (_, session):
            _, answer = await post(
                session, "completions", {"prompt": [2, 3], "n": 6, "seed": seed, "return_token_ids": True}
            )
            return [tuple(c["token_ids"]) for c in answer["choices"]], session.recorder.trajectories()

    first, trajectories = asyncio.run(body(1))
    assert len(set(first)) > 1
    assert [t.response_ids for t in trajectories] == first
    assert asyncio.run(body(1))[0] == first
    assert asyncio.run(body(2))[0] != first


def test_a_stop_text_cuts_tokens_log_probs_and_words():
    async def body(**more):
        async with serving(
            tokenizer=Letters(), sampling=SamplingParams(max_new_tokens=20, seed=1, ignore_eos=True)
        ) as (
            _,
            session,
        ):
            _, answer = await post(session, "completions", {"prompt": "cd", "return_token_ids": True, **more})
            return answer["choices"][0], session.recorder.trajectories()[0]

    whole, _ = asyncio.run(body())
    assert whole["finish_reason"] == "length"
    stop = whole["text"][3:5]
    cut, recorded = asyncio.run(body(stop=["nothing", stop]))
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    assert cut["finish_reason"] == "stop"
    spelled = Letters().decode(cut["token_ids"], special=False)
    assert spelled == cut["text"] + stop  # up to the token that completes the stop text
    assert cut["token_ids"] == whole["token_ids"][: len(cut["token_ids"])]
    assert list(recorded.response_ids) == cut["token_ids"]
    assert len(recorded.log_probs) == len(cut["token_ids"])
    assert (cut["stop_reason"], whole["stop_reason"]) == (stop, None)
    kept, _ = asyncio.run(body(stop=["nothing", stop], include_stop_str_in_output=True))
    assert kept["text"] == cut["text"] + stop


def test_the_engine_stops_at_the_stop_text():
    """It generates no tokens that would be cut off."""

    async def body():
        async with serving(tokenizer=Letters(), sampling=SamplingParams(max_new_tokens=20, stop=("c",))) as (
            engine,
            session,
        ):
            await post(session, "completions", {"prompt": "cd", "stop": "dd"})
            return [params.stop for _, params in engine.asked]

    assert asyncio.run(body()) == [("c", "dd")]


def test_stop_texts_of_the_run_need_a_tokenizer():
    sampling = SamplingParams(max_new_tokens=20, stop=("c",))
    with pytest.raises(ConfigError, match="stop strings needs a tokenizer"):
        Endpoint(EndpointConfig(model="m", context=9, sampling=sampling, key=KEY.encode()))


def test_a_stream_is_one_piece_and_an_end():
    async def body():
        async with serving(tokenizer=Letters()) as (_, session):
            messages = [{"role": "user", "content": [{"type": "text", "text": "cd"}]}]
            request = {"model": "bigram", "messages": messages, "stream": True}
            return await asyncio.to_thread(post_now, f"{session.base_url}/chat/completions", request)

    status, text = asyncio.run(body())
    first, end = text.strip().split("\n\n")
    piece = json.loads(first.removeprefix("data: "))
    assert (status, end) == (200, "data: [DONE]")
    assert piece["object"] == "chat.completion.chunk"
    assert piece["choices"][0]["delta"]["role"] == "assistant"


@pytest.mark.parametrize(
    ("path", "name"), [("completions", "max_tokens"), ("chat/completions", "max_completion_tokens")]
)
def test_no_response_is_longer_than_the_limit_of_the_endpoint(path, name):
    async def body():
        async with serving(sampling=SamplingParams(max_new_tokens=6, ignore_eos=True)) as (engine, session):
            _, answer = await post(session, path, {"prompt_token_ids": [2, 3], name: 20})
            return answer, [params.max_new_tokens for _, params in engine.asked]

    answer, asked = asyncio.run(body())
    assert asked == [6]
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (6, "length")


# -- errors
def test_who_has_no_key_learns_nothing():
    async def body():
        async with serving() as (engine, session):
            for path, key in (("completions", "x" * 32), ("completions", ""), ("models", KEY[:-1]), ("nowhere", "")):
                status, answer = await post(session, path, {"prompt": [2, 3]}, key=key)
                assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
            assert not engine.asked

    asyncio.run(body())


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"model": "gpt"}, 404, "no model 'gpt'; this endpoint has 'bigram'"),
        (
            {"prompt": [2, 3] + [4] * 70},
            400,
            "72 tokens and max_tokens is at least 1; the model's context is 64 tokens",
        ),
        ({"max_tokens": 63}, 400, "2 tokens and max_tokens is 63; the model's context is 64 tokens"),
        ({"max_tokens": 0}, 400, "max_tokens must be at least 1"),
        ({"prompt": [3, 2]}, 400, r"must begin with the 2 tokens of the session's prompt, \[2, 3\]"),
        ({"prompt": "cd"}, 400, "no tokenizer: send prompt_token_ids"),
        ({"prompt": []}, 400, "must begin with"),
        ({"stop": "x"}, 400, "no tokenizer"),
        ({"stop": ["x", ""]}, 400, "no empty strings"),
        ({"n": 1000}, 400, r"n must be in 1\.\.128; got 1000"),
        ({"temperature": 0.5}, 400, "temperature is 1.0 here, for what is made is trained on"),
        ({"logprobs": 5}, 400, "logprobs must be 0 or 1"),
        ({"tools": []}, 400, "unknown field `tools`"),
        ({"max_tokens": "5"}, 400, "Expected `int | null`, got `str`"),
    ],
)
def test_a_request_that_cannot_be_served_is_told_why(change, status, message):
    async def body():
        async with serving() as (engine, session):
            answer = await post(session, "completions", {"prompt": [2, 3], **change})
            assert not engine.asked
            assert session.recorder.trajectories() == []
            return answer

    got, answer = asyncio.run(body())
    assert got == status
    assert re.search(message, answer["error"]["message"])


def test_sessions_are_found_by_path_or_header_and_gone_when_closed():
    async def body():
        async with serving() as (_, session):
            address, _, name = session.base_url.removesuffix("/v1").rpartition("/sessions/")
            plain = f"{address}/v1/completions"
            request = {"model": "bigram", "prompt": [2, 3]}
            assert (await asyncio.to_thread(post_now, plain, request, headers={"X-Session-Id": name}))[0] == 200
            status, text = await asyncio.to_thread(post_now, plain, request)
            assert (status, json.loads(text)["error"]["code"]) == (404, "session_not_found")
            assert (await asyncio.to_thread(post_now, f"{address}/elsewhere", request))[0] == 404
            assert address.startswith("http://127.0.0.1:")

    asyncio.run(body())

    async def after():
        config = EndpointConfig(model="bigram", context=CONTEXT, sampling=SAMPLING, key=KEY.encode())
        async with asyncio.timeout(DEADLINE_S), Endpoint(config) as endpoint:
            engine = Gated()
            async with endpoint.session((2, 3), over_engine(engine, SAMPLING, "p")) as session:
                engine.open.clear()
                late = asyncio.create_task(post(session, "completions", {"prompt": [2, 3]}))
                await engine.waiting.wait()
            engine.open.set()
            assert (await late)[0] == 409  # the session is over
            assert session.recorder.trajectories() == []
            assert (await post(session, "completions", {"prompt": [2, 3]}))[0] == 404

    asyncio.run(after())


@pytest.mark.parametrize("change", [{"key": b"short"}, {"model": ""}, {"context": 1}, {"request_timeout_s": 0}])
def test_an_endpoint_that_cannot_work_is_refused(change):
    settings = {"model": "m", "context": 8, "sampling": SAMPLING, "key": KEY.encode()}
    with pytest.raises(ConfigError, match="An endpoint needs"):
        EndpointConfig(**(settings | change))


def test_a_port_that_is_taken_is_named():
    async def body():
        async with serving() as (_, session):
            port = int(session.base_url.split(":")[2].split("/")[0])
            async with serving(port=port):
                pass

    with pytest.raises(ConfigError, match=r"can't listen on 127\.0\.0\.1:"):
        asyncio.run(body())


# -- the engine
def test_a_client_that_hangs_up_aborts_its_request():
    async def body():
        async with serving() as (engine, session):
            engine.open.clear()
            host = session.base_url.split("/")[2]
            connection = http.client.HTTPConnection(host, timeout=DEADLINE_S)
            path = session.base_url.partition(host)[2] + "/completions"
            text = json.dumps({"model": "bigram", "prompt": [2, 3]})
            send = asyncio.to_thread(connection.request, "POST", path, text, {"Authorization": f"Bearer {KEY}"})
            await send
            await engine.waiting.wait()
            assert not engine.gone.is_set()
            connection.close()
            await engine.gone.wait()
            assert session.recorder.trajectories() == []

    asyncio.run(body())


def test_a_closed_gate_is_waited_for_and_the_answer_has_the_version_behind_it():
    async def body():
        async with serving() as (engine, session):
            engine.open.clear()
            asked = asyncio.create_task(post(session, "completions", {"prompt": [2, 3]}))
            await engine.waiting.wait()
            engine.new_weights(4)
            engine.open.set()
            _, answer = await asked
            (recorded,) = session.recorder.trajectories()
            return answer["choices"][0]["weight_version"], recorded.weight_version

    assert asyncio.run(body()) == (4, 4)


def test_an_interrupted_generation_continues_and_each_token_has_its_version_and_log_prob():
    async def body():
        async with serving(sampling=SamplingParams(max_new_tokens=6, ignore_eos=True)) as (engine, session):
            engine.aborts = 2
            _, answer = await post(session, "completions", {"prompt": [2, 3], "return_token_ids": True})
            return answer["choices"][0], session.recorder.trajectories(), engine.asked

    choice, (recorded,), asked = asyncio.run(body())
    assert choice["weight_versions"] == [0, 1, 2, 2, 2, 2]
    assert recorded.weight_version == choice["weight_version"] == 0
    assert [params.max_new_tokens for _, params in asked] == [6, 5, 4]
    before = [3, *choice["token_ids"]]
    by_hand = [
        log_softmax(initial_table(version), 1.0)[last, token]
        for version, last, token in zip(choice["weight_versions"], before, before[1:], strict=False)
    ]
    assert recorded.log_probs == pytest.approx(by_hand)


def test_a_request_that_is_aborted_too_often_before_its_first_token_can_be_sent_again():
    class Updated(BigramEngine):
        async def generate(self, requests, params):
            return [Generation(response_ids=(), log_probs=(), finish_reason="abort", weight_version=0)] * len(requests)

    async def body():
        config = EndpointConfig(model="bigram", context=CONTEXT, sampling=SAMPLING, key=KEY.encode())
        async with (
            asyncio.timeout(DEADLINE_S),
            Endpoint(config) as endpoint,
            endpoint.session((2, 3), over_engine(Updated(), SAMPLING, "p7")) as session,
        ):
            return *await post(session, "completions", {"prompt": [2, 3]}), session.recorder.trajectories()

    status, answer, recorded = asyncio.run(body())
    assert (status, recorded) == (503, [])
    assert f"{MAX_ABORTS + 1} times before its first token" in answer["error"]["message"]


def test_an_engine_that_fails_or_is_late_is_said_to():
    async def body():
        async with serving(request_timeout_s=0.2) as (engine, session):
            engine.open.clear()
            status, answer = await post(session, "completions", {"prompt": [2, 3]})
            assert (status, answer["error"]["code"]) == (504, "timeout")
            await engine.gone.wait()

        async with serving() as (engine, session):

            async def broken(requests, params):
                raise RolloutError("no memory")

            engine.generate = broken
            status, answer = await post(session, "completions", {"prompt": [2, 3], "n": 2})
            assert (status, answer["error"]["message"]) == (503, "no memory")
            assert session.recorder.trajectories() == []

    asyncio.run(body())


# -- a rollout
AGENT = """
import json, sys, urllib.request
base_url, key = sys.argv[1:]

def complete(prompt, **more):
    body = json.dumps({"model": "bigram", "prompt": prompt, "return_token_ids": True, **more}).encode()
    request = urllib.request.Request(base_url + "/completions", body, {"Authorization": "Bearer " + key})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["token_ids"]

prompt = json.load(sys.stdin)
first = complete(prompt, max_tokens=1)
complete(prompt + first + [7], max_tokens=2)     # the tool said 7
complete(prompt + [4], max_tokens=2)             # the context was reset
"""
"""An agent that knows only its URL and key."""


def test_an_agent_in_a_process_of_its_own_drives_a_rollout_and_its_tokens_land_in_the_data_plane():
    prompts = [(2, 3), (4,)]

    async def agent(row, base_url, key):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", AGENT, base_url, key, stdin=asyncio.subprocess.PIPE
        )
        await process.communicate(json.dumps(row.prompt_ids).encode())
        assert process.returncode == 0

    async def body():
        sampling = SamplingParams(max_new_tokens=6, ignore_eos=True, seed=5)
        kind = agent_session(agent, model="bigram", context=CONTEXT, sampling=sampling)
        plane, engine = MemoryDataPlane(), Gated()
        engine.new_weights(9)
        data = [PromptRow(prompt_ids=ids, data_source="d", ground_truth="") for ids in prompts]
        worker = RolloutWorker(plane, engine, {"train": data}, kind, observations=True)
        partition = Partition(name=TRAIN_PARTITION, split="train", step=1, n=1, sampling=sampling)
        call = RolloutCall(partition=partition, prompts=leased({"p0": 0, "p1": 1}))
        async with asyncio.timeout(DEADLINE_S):
            result = await worker.rollout(call)
        rows = await plane.list_rows(TRAIN_PARTITION)
        meta = KVBatchMeta(partition=TRAIN_PARTITION, keys=tuple(sorted(rows.keys)))
        return (
            result,
            meta.keys,
            await plane.get(meta, ["responses", "response_mask", "rollout_log_probs", "observation"]),
            rows,
        )

    result, keys, data, rows = asyncio.run(body())
    assert keys == ("p0/0/0", "p0/0/1", "p1/0/0", "p1/0/1")
    assert result.tokens == 14
    assert set(rows.tag_values("version")) == {9}
    table = log_softmax(initial_table(9), 1.0)
    for place, key in enumerate(keys):
        ids = data.ragged("responses").row(place).tolist()
        made = data.ragged("response_mask").row(place).tolist()
        assert made == ([True, False, True, True] if key.endswith("/0") else [False, True, True])
        observed = data.ragged("observation").row(place).tolist()
        assert observed == ([False, True, False, False] if key.endswith("/0") else [False] * 3)
        assert ids[made.index(False)] == (7 if key.endswith("/0") else 4)
        before = [prompts[int(key[1])][-1], *ids]
        by_hand = [table[a, b] if own else 0.0 for a, b, own in zip(before, ids, made, strict=False)]
        assert data.ragged("rollout_log_probs").row(place).tolist() == pytest.approx(by_hand)
