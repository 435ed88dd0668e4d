"""What rows of verl's data say to their agents: tools, interactions, and what is refused."""

from __future__ import annotations

import asyncio
import threading

import msgspec
import pytest

from rl_protocol import ConfigError, RolloutError
from rl_protocol.ports import Generation, SamplingParams
from rl_trainer import PromptRow, Tokenizer
from rl_trainer.config import AgentConfig, RolloutConfig
from rl_trainer.rollout.agents import (
    DIALECTS,
    Call,
    InteractionKind,
    Limits,
    ToolAgent,
    ToolKind,
)
from rl_trainer.rollout.agents.environment import Environment
from rl_trainer.rollout.session_kinds import session_kind
from rl_trainer.rollout.session_turns import SessionRef, run_sessions

LETTERS = Tokenizer(encode=lambda text: list(map(ord, text)), decode=lambda ids: "".join(map(chr, ids)))


class Shelf:
    """A tool with a state: each session has its own shelf."""

    name, description, arguments = "shelf", "Keeps words.", msgspec.defstruct("Word", [("word", str)])

    def __init__(self, first="", room=9):
        self.words, self.room = [first] if first else [], room

    def call(self, arguments, separator=","):
        self.words.append(arguments.word)
        return separator.join(self.words[-self.room :])


class Teacher:
    """Asks again until it reads the answer."""

    def __init__(self, answer, patience=9):
        self.answer, self.patience = answer, patience

    def reply(self, text):
        return None if self.answer in text else "Again."


def row(agent="", **extra_info):
    return PromptRow(prompt_ids=(1,), data_source="d", ground_truth="", extra_info=extra_info, agent=agent)


def environment():
    return Environment([ToolKind(Shelf)], {"teacher": InteractionKind(Teacher)})


def told(*rows, words=("a", "b")):
    """What the shelf answers in a session of each row, one word after the other."""

    async def session(one):
        async with environment().open(one, Limits(call_timeout_s=60.0)) as opened:
            return [(await opened.answers([Call("shelf", {"word": word})]))[0].text for word in words]

    async def main():
        return [await session(one) for one in rows]

    return asyncio.run(main())


def test_a_row_creates_its_own_tool_and_adds_to_each_call():
    kwargs = {"create_kwargs": {"first": "x", "room": None}, "execute_kwargs": {"separator": "+"}}
    assert told(row(tools_kwargs={"shelf": kwargs}), row()) == [["x+a", "x+a+b"], ["a", "a,b"]]


def test_what_parquet_writes_for_absent_keys_is_absent():
    nothing = row(
        need_tools_kwargs=None, tools_kwargs={"shelf": None, "other": None}, interaction_kwargs={"name": None}
    )
    environment().check(nothing)
    assert told(nothing) == [["a", "a,b"]]


@pytest.mark.parametrize(
    ("extra_info", "why"),
    [
        (
            {"tools_kwargs": {"shelve": {}}},
            r"tools_kwargs\.shelve is of no tool in AgentConfig\.tools; there are shelf",
        ),
        ({"tools_kwargs": {"shelf": {"create_kwargs": {"size": 3}}}}, r"create_kwargs can't be used: .*'size'"),
        ({"tools_kwargs": {"shelf": {"execute_kwargs": {"glue": ""}}}}, r"execute_kwargs can't be used: .*'glue'"),
        ({"tools_kwargs": {"shelf": {"calc_reward_kwargs": {"x": 1}}}}, "tools give no rewards"),
        ({"tools_kwargs": ["shelf"]}, r"extra_info of a row: .*\$\.tools_kwargs"),
        ({"need_tools_kwargs": True}, r"need_tools_kwargs is true, and extra_info\.tools_kwargs is empty"),
        ({"interaction_kwargs": {"name": "pupil"}}, r"must be in AgentConfig\.interactions \(teacher\); got 'pupil'"),
        ({"interaction_kwargs": {"answer": "3"}}, r"name must be in AgentConfig\.interactions .* got None"),
        ({"interaction_kwargs": {"name": "teacher"}}, r"interaction_kwargs can't be used: missing .*'answer'"),
    ],
)
def test_what_an_agent_can_not_do_is_refused(extra_info, why):
    with pytest.raises(ConfigError, match=why):
        environment().check(row(**extra_info))


class Scripted:
    """An engine whose turns are these texts, one token per character."""

    weight_version = 0

    def __init__(self, *turns):
        self.turns = list(turns)

    async def generate(self, requests, params):
        (_,) = requests
        ids = tuple(map(ord, self.turns.pop(0)))
        return [Generation(response_ids=ids, log_probs=(0.0,) * len(ids), finish_reason="stop", weight_version=0)]


def converse(one, *turns, dialect="llama3_json", stop=(), **limits):
    agent = ToolAgent([ToolKind(Shelf)], dialect, Limits(**limits), {"teacher": InteractionKind(Teacher)})
    sampling = SamplingParams(max_new_tokens=400, stop=stop)
    out = asyncio.run(run_sessions(agent.session, [SessionRef("p", 0, one)], Scripted(*turns), sampling, LETTERS))
    (trajectories,) = out
    if isinstance(trajectories, RolloutError):
        raise trajectories
    (trajectory,) = trajectories
    seen = [t for t, made in zip(trajectory.response_ids, trajectory.response_mask, strict=True) if not made]
    return LETTERS.decode(seen), trajectory.stats


class Unready(Shelf):
    def __init__(self, path=None):
        raise OSError("no index")


class Nameless(Shelf):
    description = property(lambda self: self.text)


class Untyped(Shelf):
    arguments = dict


class Late(Shelf):
    async def call(self, arguments):
        return "late"


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (ToolKind(Unready), r"The tool Unready can't be described: OSError: no index \(.*test_environment\.py:\d+\)\."),
        (
            ToolKind(Nameless),
            r"The tool Nameless can't be described: AttributeError: 'Nameless' object has no .*'text'",
        ),
        (ToolKind(lambda path: Shelf()), r"The tool <lambda> can't be described: TypeError: .*'path'\. A tool of"),
        (
            ToolKind(Untyped),
            r"The arguments of the tool 'shelf' must be a subclass of msgspec\.Struct; got <class 'dict'>\.",
        ),
        (ToolKind(Late), r"The tool Late has an async call, which nothing awaits\. Write def call"),
    ],
)
def test_a_tool_that_can_not_be_used_is_refused_before_the_run(kind, why):
    with pytest.raises(ConfigError, match=why):
        ToolAgent([kind], "hermes")


def test_an_interaction_replies_until_it_ends_the_conversation():
    asked = row(interaction_kwargs={"name": "teacher", "answer": "42"})
    seen, stats = converse(asked, "41", '{"name": "shelf", "parameters": {"word": "w"}}', "42")
    dialect = DIALECTS["llama3_json"]
    assert seen.startswith(dialect.message("Again."))
    assert seen.endswith('"w"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n')
    assert (stats.turns, stats.tool_calls, stats.finish) == (3, 1, "stop")
    assert converse(row(), "41")[1].turns == 1  # without an interaction the first answer ends it
    assert converse(asked, "41", "40", turns=2)[1].finish == "turns"


def test_a_turn_that_a_stop_string_ended_is_closed_by_what_follows_it():
    """GLM-4.5 ends a turn with the mark of the next one."""
    asked = row(interaction_kwargs={"name": "teacher", "answer": "42"})
    call = "<tool_call>shelf<arg_key>word</arg_key><arg_value>w</arg_value></tool_call>"
    seen, _ = converse(asked, "41;", f"{call};", "42", dialect="glm45", stop=(";",))
    response = "\n<tool_response>\nw\n</tool_response>"
    assert seen == f"<|user|>\nAgain.<|assistant|><|observation|>{response}<|assistant|>"


def test_an_interaction_that_does_not_answer_fails_the_session(monkeypatch):
    monkeypatch.setattr(Teacher, "reply", lambda self, text: threading.Event().wait())
    with pytest.raises(RolloutError, match=r"Teacher gave no reply within AgentConfig\.call_timeout_s=0\.05"):
        converse(row(interaction_kwargs={"name": "teacher", "answer": "42"}), "41", call_timeout_s=0.05)


@pytest.mark.parametrize(
    ("raised", "why"),
    [
        (SystemExit(2), r"sys\.exit\(2\) was called"),
        (StopIteration(), r"StopIteration\(\) was raised"),  # by next() on replies that are over
        (asyncio.CancelledError(), r"CancelledError\(\) was raised"),
    ],
)
def test_an_interaction_that_raises_anything_fails_the_session(monkeypatch, raised, why):
    def leave(self, text):
        raise raised

    monkeypatch.setattr(Teacher, "reply", leave)
    with pytest.raises(RolloutError, match=why):
        converse(row(interaction_kwargs={"name": "teacher", "answer": "42"}), "41")


def test_an_interaction_that_replies_with_no_text_fails_the_session(monkeypatch):
    monkeypatch.setattr(Teacher, "reply", lambda self, text: b"Again.")
    with pytest.raises(RolloutError, match="Teacher replied with bytes in place of a text or None"):
        converse(row(interaction_kwargs={"name": "teacher", "answer": "42"}), "41", "42")


@pytest.mark.parametrize("name", DIALECTS)
def test_a_message_of_the_user_is_not_an_answer_of_a_tool(name):
    message = DIALECTS[name].message("Again.")
    assert "Again." in message
    assert not any(mark in message for mark in ("tool_response", "TOOL_RESULTS", "ipython"))


def test_rows_of_a_single_turn_agent_get_one_turn():
    config = RolloutConfig(session="tool_agent", agent=AgentConfig(tools=("calculator",), dialect="llama3_json"))
    call = '{"name": "calculator", "parameters": {"expression": "1+1"}}'

    def turns(one):
        refs = [SessionRef("p", 0, one)]
        sampling = SamplingParams(max_new_tokens=400)
        ((trajectory,),) = asyncio.run(
            run_sessions(session_kind(config, ""), refs, Scripted(call, "2"), sampling, LETTERS)
        )
        return 1 if trajectory.stats is None else trajectory.stats.turns

    assert [turns(row(agent)) for agent in ("", "tool_agent", "single_turn_agent")] == [2, 2, 1]
