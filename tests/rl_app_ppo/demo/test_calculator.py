"""The calculator demo: its problems, tokens, score and sessions, and what its warm-up teaches."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from rl_app_ppo.config.loading import load_config
from rl_app_ppo.demo.calculator import careless_answer, make_split, score
from rl_app_ppo.demo.calculator_chats import LLAMA3, QWEN
from rl_app_ppo.demo.demos import DEMOS, Piece
from rl_app_ppo.demo.model import build_tokenizer
from rl_app_ppo.demo.prompts import prompt_ids
from rl_app_ppo.demo.settings import ModelSettings, WarmUpSettings
from rl_app_ppo.demo.tokenizer import EOS_ID
from rl_app_ppo.demo.warmup import right_answers, warm_up
from rl_app_ppo.inputs.data import open_data
from rl_app_ppo.inputs.session import session_of
from rl_app_ppo.inputs.tokenizer import session_tokenizer
from rl_protocol import ConfigError
from rl_protocol.ports import Generation, SamplingParams
from rl_trainer.data.chat_template import PromptEncoder
from rl_trainer.rollout.agents import DIALECTS, Answer, Calculator, Call, described
from rl_trainer.rollout.agents.dialects.names import dialect_of_template
from rl_trainer.rollout.session_turns import SessionRef, run_sessions

DEMO = DEMOS["calculator"]


def test_answers_are_products_of_six_digits_and_guesses_are_never_right():
    split = make_split(0, train_size=3000, validation_size=500)
    for problem in (*split.train, *split.validation):
        a, b = map(int, problem.prompt.removesuffix("=").split("*"))
        assert problem.answer == str(a * b)
        assert (len(problem.prompt), len(problem.answer)) == (8, 6)
        assert careless_answer(problem) == f"{a}{b}" != problem.answer
        assert set(problem.prompt + problem.answer) <= set(DEMO.vocabulary)


def test_the_split_depends_on_the_seed_and_validation_not_on_the_size_of_training():
    split = make_split(1, train_size=100, validation_size=50)
    # Split refuses a pair that is in both
    assert (len(split.train), len(split.validation)) == (100, 50)
    assert split.validation == make_split(1, train_size=7, validation_size=50).validation
    assert split.validation != make_split(2, train_size=100, validation_size=50).validation
    for train, validation in ((-1, 10), (10, -1), (200_000, 1)):
        with pytest.raises(ConfigError, match=r"data\.train_size"):
            make_split(0, train_size=train, validation_size=validation)


@pytest.mark.parametrize("chat", [QWEN, LLAMA3], ids=lambda chat: chat.dialect)
def test_a_dialect_reads_the_calls_of_its_model(chat):
    assert dialect_of_template(chat.template) == chat.dialect
    assert DIALECTS[chat.dialect].calls(chat.written("384*592")) == [Call("calculator", {"expression": "384*592"})]
    assert DIALECTS[chat.dialect].calls("384592") == []


@pytest.mark.parametrize("name", ["calculator", "calculator_llama3"])
def test_prompts_describe_the_tool_and_only_an_error_is_unknown(name):
    demo = DEMOS[name]
    tokenizer = build_tokenizer(demo.vocabulary, demo.template)
    encoder = PromptEncoder(tokenizer.backend_tokenizer, demo.template, tools=demo.tools)
    problem = make_split(0, train_size=1, validation_size=0).train
    (ids,) = prompt_ids(encoder, problem)
    assert json.dumps(described(Calculator())) in tokenizer.decode(ids)
    unknown = tokenizer.unk_token_id
    assert unknown not in [*ids, *(token for piece in demo.right(problem[0]) for token in tokenizer.encode(piece.text))]
    failed = DIALECTS[dialect_of_template(demo.template)].observation([Answer("error: no such thing", failed=True)])
    assert tokenizer.encode(failed).count(unknown) == 1


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("call\nanswer\n227328", 1.0),
        ("227328", 1.0),
        ("call\nanswer\n22732", 0.0),
        ("227328\n", 0.0),
        ("384592", 0.0),
        ("", 0.0),
    ],
)
def test_the_score_is_of_the_last_turn(response, right):
    result = score("s", response, "227328")
    assert (result["score"], result["acc"]) == (right, right)


@pytest.mark.parametrize(("name", "chat"), [("calculator", QWEN), ("calculator_llama3", LLAMA3)])
def test_a_session_of_the_demo_in_its_own_tokens(name, chat):
    config = load_config(["algorithm=grpo_calculator", f"data.demo={name}"])
    text = session_tokenizer(build_tokenizer(chat.vocabulary).backend_tokenizer)
    row = open_data(config, None)["train"][0]
    problem = text.decode(row.prompt_ids).partition("=")[0].rpartition("\n")[2]
    turns = [chat.written("38*"), chat.written(problem), row.ground_truth]

    class Scripted:
        weight_version = 0

        async def generate(self, requests, params):
            ids = (*text.encode(turns.pop(0)), EOS_ID)
            return [Generation(response_ids=ids, log_probs=(-1.0,) * len(ids), finish_reason="stop", weight_version=0)]

    sampling = SamplingParams(max_new_tokens=48)
    kind = session_of(config, None)
    ((one,),) = asyncio.run(run_sessions(kind, [SessionRef("p", 0, row)], Scripted(), sampling, text))
    written = "".join(chat.vocabulary[token] for token in one.response_ids)
    (failed,) = (DIALECTS[chat.dialect].observation([Answer("<unk>", failed=True)]),)
    end, told = chat.end, chat.observation(row.ground_truth)
    assert written == f"{chat.written('38*')}{end}{failed}{chat.written(problem)}{end}{told}{row.ground_truth}{end}"
    seen = [token for token, made in zip(one.response_ids, one.response_mask, strict=True) if not made]
    assert "".join(chat.vocabulary[token] for token in seen) == failed + told
    assert (one.stats.turns, one.stats.tool_calls, one.stats.tool_errors, one.stats.finish) == (3, 2, 1, "stop")
    assert score("d", text.decode(one.response_ids), row.ground_truth)["score"] == 1.0


def test_the_preset_fits_together():
    config = load_config(["algorithm=grpo_calculator"])
    data = open_data(config, None)
    assert (len(data["train"]), len(data["val"])) == (4000, 256)
    assert data["val"][0].data_source == "three_digit_multiplication"
    with pytest.raises(ConfigError, match=r"data\.demo must be one of .*addition.*calculator"):
        load_config(["data.demo=abacus"])


def test_the_warm_up_teaches_turns_and_not_what_the_tool_says():
    """A model trained only on the text it writes can't predict the output of the tool."""
    settings = WarmUpSettings(
        demo="calculator",
        careless_share=0.0,
        train_size=16,
        validation_size=8,
        max_steps=60,
        batch_size=16,
        lr=1e-2,
        check_every=60,
        model=ModelSettings(hidden_size=32, intermediate_size=64, layers=2, heads=4),
    )
    model, tokenizer = warm_up(settings).model, build_tokenizer(DEMO.vocabulary)
    problem = make_split(0, train_size=16, validation_size=8).train[:8]
    written = right_answers(model, tokenizer, problem, DEMO)
    taught = DEMO.right(problem[0])
    assert [piece.observed for piece in taught] == [False, True, False]
    assert taught[1] == Piece(QWEN.observation(problem[0].answer), observed=True)

    def all_written(one):
        return [Piece(piece.text) for piece in DEMO.right(one)][1:2]

    told = right_answers(model, tokenizer, problem, replace(DEMO, right=all_written))
    assert written.probability > 1e-3
    assert told.probability < written.probability / 10
