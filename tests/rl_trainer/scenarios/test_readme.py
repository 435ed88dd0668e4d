"""The python blocks of the package's docs run as written."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from rl_protocol.ports import Generation, SamplingParams
from rl_protocol.testing.bigram_model import BigramEngine
from rl_trainer import PromptRow, Tokenizer
from rl_trainer.algorithms.losses import POLICY_LOSSES
from rl_trainer.driver.hooks import notify
from rl_trainer.rollout.agents import ToolAgent
from rl_trainer.rollout.serving import FolderChatTokenizer
from rl_trainer.rollout.session_turns import SessionRef, run_sessions

ROOT = Path(__file__).parents[3]
KEY = "k" * 32
LETTERS = Tokenizer(
    encode=lambda text: [ord(letter) for letter in text], decode=lambda ids: "".join(chr(i) for i in ids if i > 1)
)


@pytest.fixture
def run_block(readme_code):
    """Return a function that runs a block of a file in docs/ and returns its definitions."""

    def run(file, number):
        space = {"__name__": "readme"}
        exec(compile(readme_code("packages/rl-trainer", number, f"docs/{file}"), file, "exec"), space)
        return space

    return run


class Saying:
    """An engine that answers with these texts, one per turn."""

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
    (said,) = play(ToolAgent([run_block("agents.md", 0)["TOOL"]], "hermes").session, Saying(call, "sunny"))
    assert said.startswith(call)
    assert "Sunny in Bergen." in said
    assert said.endswith("sunny")


def test_a_session_of_two_trajectories(run_block):
    engine = Saying("add", "42")
    assert play(run_block("agents.md", 1)["SESSION"], engine) == ["add", "Plan: add42"]
    assert engine.prompts == ["ab", "abPlan: add"]


def test_an_endpoint(run_block, model_path, monkeypatch):
    monkeypatch.setenv("RL_ENDPOINT_KEY", KEY)
    space = run_block("agents.md", 2)

    async def ask(base_url):
        def post():
            body = {"model": "policy", "prompt": [2, 3], "max_tokens": 4, "return_token_ids": True}
            request = urllib.request.Request(f"{base_url}/completions", json.dumps(body).encode(), method="POST")
            request.add_header("Authorization", f"Bearer {KEY}")
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)

        space["answer"] = await asyncio.to_thread(post)

    monkeypatch.setattr(FolderChatTokenizer, "load", lambda folder: None)
    (trajectory,) = asyncio.run(space["serve"](BigramEngine(), model_path, (2, 3), ask))
    assert list(trajectory.response_ids) == space["answer"]["choices"][0]["token_ids"]


def test_a_curriculum(run_block):
    kind = run_block("data.md", 0)["easy_first"]
    rows = [
        PromptRow(prompt_ids=(2,), data_source="d", ground_truth="", extra_info={"difficulty": d}) for d in (3, 1, 2)
    ]
    curriculum = kind.make(rows)
    assert list(curriculum.epoch(0, np.random.default_rng(0))) == [1, 2, 0]
    assert sorted(curriculum.epoch(1, np.random.default_rng(0))) == [0, 1, 2]


def test_forms_of_a_reward_function(run_block):
    assert list(inspect.signature(run_block("rewards.md", 0)["score"]).parameters) == [
        "data_sources",
        "solution_strs",
        "ground_truths",
        "extra_infos",
    ]


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("packages/rl-trainer/docs/algorithms.md", r"it is split\. ([^.]*) are one loss per response"),
        ("docs/guides/other_trainers.md", r"The losses ([^.]*) also need\s`actor\.loss_agg_mode=seq-mean-token-mean`"),
    ],
)
def test_a_page_names_the_losses_of_whole_responses(page, words):
    (named,) = re.findall(words, (ROOT / page).read_text())
    assert set(re.findall(r"`(\w+)`", named)) == {
        name for name in POLICY_LOSSES.names() if POLICY_LOSSES.get(name).per_sequence
    }


def test_a_hook(run_block, capsys):
    hook = run_block("running.md", 0)["HOOK"]
    for step, score in enumerate([0.25, 0.125, 0.5]):
        notify({"best": hook}, "on_step_end", step, {"critic/score/mean": score})
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["step 0: best score so far 0.250", "step 2: best score so far 0.500"]
