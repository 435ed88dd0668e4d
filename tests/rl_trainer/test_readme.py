"""The python blocks of the package's README run as written."""

from __future__ import annotations

import asyncio
import inspect
import json
import urllib.request

import numpy as np
import pytest

from rl_protocol.ports import Generation, SamplingParams
from rl_protocol.testing.bigram import BigramEngine
from rl_trainer import Codec, PromptRow
from rl_trainer.serving import ChatCodec
from rl_trainer.sessions import SessionRef, run_sessions

KEY = "k" * 32
LETTERS = Codec(
    encode=lambda text: [ord(letter) for letter in text], decode=lambda ids: "".join(chr(i) for i in ids if i > 1)
)


@pytest.fixture
def run_block(readme_code):
    """number -> what the block defines."""

    def run(number):
        space = {"__name__": "readme"}
        exec(compile(readme_code("packages/rl-trainer", number), "README.md", "exec"), space)
        return space

    return run


class Saying:
    """An engine that says these texts, one a turn."""

    weight_version = 0

    def __init__(self, *texts):
        self.texts, self.prompts = list(texts), []

    async def generate(self, requests, params):
        self.prompts += [LETTERS.decode(r.prompt_ids) for r in requests]
        ids = [*map(ord, self.texts.pop(0)), 1]
        return [
            Generation(response_ids=tuple(ids), log_probs=(0.0,) * len(ids), finish_reason="stop", weight_version=0)
        ]


def play(kind, engine):
    row = PromptRow(prompt_ids=tuple(map(ord, "ab")), data_source="d", ground_truth="")
    ((*trajectories,),) = asyncio.run(
        run_sessions(kind, [SessionRef("p", 0, row)], engine, SamplingParams(max_new_tokens=400), LETTERS)
    )
    return [LETTERS.decode(one.response_ids) for one in trajectories]


def test_a_tool(run_block):
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Bergen"}}</tool_call>'
    (said,) = play(run_block(1)["AGENT"], Saying(call, "sunny"))
    assert said.startswith(call)
    assert "Sunny in Bergen." in said
    assert said.endswith("sunny")


def test_a_session_of_two_trajectories(run_block):
    engine = Saying("add", "42")
    assert play(run_block(2)["SESSION"], engine) == ["add", "Plan: add42"]
    assert engine.prompts == ["ab", "abPlan: add"]


def test_an_endpoint(run_block, model_path, monkeypatch):
    monkeypatch.setenv("RL_ENDPOINT_KEY", KEY)
    space = run_block(3)

    async def ask(base_url):
        def post():
            body = {"model": "policy", "prompt": [2, 3], "max_tokens": 4, "return_token_ids": True}
            request = urllib.request.Request(f"{base_url}/completions", json.dumps(body).encode(), method="POST")
            request.add_header("Authorization", f"Bearer {KEY}")
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)

        space["answer"] = await asyncio.to_thread(post)

    monkeypatch.setattr(ChatCodec, "load", lambda folder: None)
    (trajectory,) = asyncio.run(space["serve"](BigramEngine(), model_path, (2, 3), ask))
    assert list(trajectory.response_ids) == space["answer"]["choices"][0]["token_ids"]


def test_a_curriculum(run_block):
    kind = run_block(4)["easy_first"]
    rows = [
        PromptRow(prompt_ids=(2,), data_source="d", ground_truth="", extra_info={"difficulty": d}) for d in (3, 1, 2)
    ]
    curriculum = kind.make(rows)
    assert list(curriculum.epoch(0, np.random.default_rng(0))) == [1, 2, 0]
    assert sorted(curriculum.epoch(1, np.random.default_rng(0))) == [0, 1, 2]


def test_forms_of_a_reward_function(run_block):
    assert list(inspect.signature(run_block(5)["score"]).parameters) == [
        "data_sources",
        "solution_strs",
        "ground_truths",
        "extra_infos",
    ]
