"""The agent loop: parsing of calls, tool execution, tokens of a trajectory, finish reasons."""

from __future__ import annotations

import asyncio
import json
import threading
from fractions import Fraction

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from relative import apart

from rl_protocol import BatchData, ConfigError, KVBatchMeta, RolloutError, ragged
from rl_protocol.ports import Generation, SamplingParams
from rl_protocol.testing.bigram_model import BigramEngine, BigramPolicy
from rl_trainer import PromptRow, RolloutStats, SessionKind, Tokenizer
from rl_trainer.rollout.agents import (
    Answer,
    Calculator,
    Call,
    Hermes,
    Limits,
    Malformed,
    PlainJSON,
    ToolAgent,
    ToolKind,
    Transcript,
    described,
)
from rl_trainer.rollout.agents.tools import ToolError, answer
from rl_trainer.rollout.partial_generation import MAX_ABORTS
from rl_trainer.rollout.session_turns import SessionRef, run_sessions
from rl_trainer.rollout.trajectory_stats import rollout_metrics

EOS = 1
LETTERS = Tokenizer(
    encode=lambda text: [ord(letter) for letter in text],
    decode=lambda ids: "".join(chr(token) for token in ids if token != EOS),
)


# -- parsing of calls
ADD = '{"name": "add", "arguments": {"a": 1, "b": [2]}}'
ADDED = Call("add", {"a": 1, "b": [2]})
TAGS = '{"name": "write", "arguments": {"text": "<tool_call>{}</tool_call>"}}'
TAGGED = Call("write", {"text": "<tool_call>{}</tool_call>"})


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It is 3.", []),
        ("", []),
        (f"<tool_call>{ADD}</tool_call>", [ADDED]),
        (f"First.\n<tool_call>\n{ADD}\n</tool_call>\nthen\n<tool_call>{ADD}</tool_call> ", [ADDED, ADDED]),
        ('<tool_call>{"name": "now"}</tool_call>', [Call("now")]),
        ('<tool_call>{"name": "now", "id": 7}</tool_call>', [Call("now")]),
        ("</tool_call> <tool_response>", []),
        (f"<tool_call>{ADD}", ["not followed by"]),
        (f"<tool_call>{ADD[:-1]}</tool_call>", ["not JSON"]),
        (f"<tool_call>{ADD}<tool_call>{ADD}</tool_call>", ["not followed by", ADDED]),
        ("<tool_call></tool_call>", ["not JSON"]),
        (f"<tool_call>{TAGS}</tool_call><tool_call>\n{TAGS}\n</tool_call>", [TAGGED, TAGGED]),
        (f"<tool_call>{TAGS}<tool_call>{ADD}</tool_call>", ["not followed by", ADDED]),
        (f"<tool_call>{TAGS}!</tool_call>{ADD}<tool_call>{TAGS}", ["not JSON", "not followed by"]),
        ("<tool_call>add(1, 2)</tool_call>", ["not JSON"]),
        ('<tool_call>["add"]</tool_call>', ["a call is"]),
        ('<tool_call>{"arguments": {}}</tool_call>', ["`name`"]),
        ('<tool_call>{"name": 3}</tool_call>', [r"$.name"]),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', [r"$.arguments"]),
        ('<tool_call>{"name": "add", "arguments": null}</tool_call>', [r"$.arguments"]),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", ["not JSON"]),
        ('<tool_call>{"name": "\udcff"}</tool_call>', [Call("?")]),
        ('<tool_call>{"name": "a", "arguments": {"n": ' + "9" * 5000 + "}}</tool_call>", ["not JSON"]),
    ],
)
def test_hermes_calls(text, found):
    same(Hermes().calls(text), found)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It is 3.", []),
        ("", []),
        (ADD, [ADDED]),
        (f"\n {ADD} \n", [ADDED]),
        (f'[{ADD}, {{"name": "now"}}]', [ADDED, Call("now")]),
        ('{"answer": 3}', []),
        ("[1, 2]", []),
        ("{x", []),
        ("[]", []),
        (f"I call {ADD}", []),
        (ADD[:-1], ["not JSON"]),
        ('{"name"', ["not JSON"]),
        ('{"name": "add", "arguments": 3}', [r"$.arguments"]),
        ('{"first": {"name": "x"}}', []),
        ('["name"]', []),
        ('{"name":' * 50_000, ["not JSON"]),
    ],
)
def test_plain_json_calls(text, found):
    same(PlainJSON().calls(text), found)


def same(calls, expected):
    assert len(calls) == len(expected)
    for call, want in zip(calls, expected, strict=True):
        if isinstance(want, str):
            assert isinstance(call, Malformed)
            assert want in call.why
        else:
            assert call == want


FRAGMENTS = (
    "<tool_call>",
    "</tool_call>",
    '{"name":',
    '"add"',
    ',"arguments":',
    "{",
    "}",
    "[",
    "]",
    '"',
    "1e999",
    "\\u",
)
HOSTILE = st.one_of(st.text(), st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=3))).map("".join))
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**63), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
)


@given(HOSTILE)
def test_no_text_breaks_a_dialect(text):
    hermes, plain = Hermes().calls(text), PlainJSON().calls(text)
    assert len(hermes) == text.count("<tool_call>")
    assert all(isinstance(one, Call | Malformed) for one in [*hermes, *plain])


@given(st.lists(st.tuples(st.text(), st.dictionaries(st.text(), JSON, max_size=3)), min_size=1, max_size=3))
def test_what_was_meant_is_what_is_read(meant):
    calls = [Call(name, arguments) for name, arguments in meant]
    written = [{"name": name, "arguments": arguments} for name, arguments in meant]
    assert PlainJSON().calls(json.dumps(written)) == calls
    if not any("tool_call>" in json.dumps(one, ensure_ascii=False) for one in written):
        assert Hermes().calls("".join(f"<tool_call>{json.dumps(one)}</tool_call>" for one in written)) == calls


def test_answers_look_as_the_chat_template_of_qwen_writes_them():
    assert Hermes().observation([Answer("3"), Answer("error: no", failed=True)]) == (
        "\n<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\nerror: no\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert PlainJSON().observation([Answer("3"), Answer("4")]) == (
        "\n<|im_start|>user\n3\n4<|im_end|>\n<|im_start|>assistant\n"
    )


# -- tools
class Wait(msgspec.Struct, forbid_unknown_fields=True):
    seconds: int
    unit: str = "s"


class Odd:
    """A tool that behaves as the given function."""

    name, description, arguments = "odd", "Misbehaves.", Wait

    def __init__(self, act):
        self.act = act

    def call(self, arguments):
        return self.act(arguments)


def told(call, *tools, timeout_s=60.0):
    return asyncio.run(answer(call, {tool.name: tool for tool in tools}, timeout_s))


def fails(arguments):
    raise KeyError("the disk")


def exits(arguments):
    raise SystemExit(2)


def cancels(arguments):
    raise asyncio.CancelledError


class PanicError(BaseException):
    """As libraries in Rust raise it."""


def panics(arguments):
    raise PanicError("at line 3")


class MuteError(Exception):
    def __str__(self):
        return self.reason


def fails_mutely(arguments):
    raise MuteError


class MuteToolError(ToolError):
    """Its message is missing, since it does not call the `__init__` of its base class."""

    def __init__(self):
        pass


def refuses_mutely(arguments):
    raise MuteToolError


class Even(msgspec.Struct):
    number: int

    def __post_init__(self):
        raise KeyError(self.number)


@pytest.mark.parametrize(
    ("call", "act", "why"),
    [
        (Malformed("no JSON"), None, "error: no JSON"),
        (Call("even", {}), None, "error: there is no tool 'even'; there are odd"),
        (Call("odd", {}), None, "error: odd: Object missing required field `seconds`"),
        (Call("odd", {"seconds": "3"}), None, "error: odd: Expected `int`, got `str` - at `$.seconds`"),
        (Call("odd", {"seconds": 3, "minutes": 1}), None, "error: odd: Object contains unknown field `minutes`"),
        (Call("odd", {"seconds": 3}), fails, "error: odd: KeyError: 'the disk'"),
        (Call("odd", {"seconds": 3}), exits, "error: odd: SystemExit: 2"),
        (Call("odd", {"seconds": 3}), cancels, "error: odd: CancelledError: "),
        (Call("odd", {"seconds": 3}), panics, "error: odd: PanicError: at line 3"),
        (Call("odd", {"seconds": 3}), fails_mutely, "error: odd: MuteError: its __str__ raised AttributeError"),
        (Call("odd", {"seconds": 3}), refuses_mutely, "error: odd: its __str__ raised AttributeError"),
        (Call("odd", {"seconds": 3}), lambda _: 3, "error: odd returned int in place of a text"),
    ],
)
def test_what_goes_wrong_in_a_call_is_its_answer(call, act, why):
    assert told(call, Odd(act)) == Answer(why, failed=True)


def test_a_type_of_arguments_that_raises_is_an_answer():
    tool = Odd(None)
    tool.arguments = Even
    assert told(Call("odd", {"number": 3}), tool) == Answer("error: odd: KeyError: 3", failed=True)


def test_arguments_reach_the_tool_checked():
    assert told(Call("odd", {"seconds": 3}), Odd(lambda a: f"{a.seconds} {a.unit}")) == Answer("3 s")


def test_a_tool_that_never_returns_is_left_alone_at_its_deadline():
    release, ended = threading.Event(), threading.Event()

    def hang(arguments):
        release.wait()
        ended.set()
        return "too late"

    assert told(Call("odd", {"seconds": 3}), Odd(hang), timeout_s=0.05) == Answer(
        "error: odd took longer than 0.05 s", failed=True
    )
    release.set()  # the event loop is gone; a late return must do no harm
    assert ended.wait(60)


def test_a_tool_is_described_as_chat_templates_want_it():
    assert described(Odd(None)) == {
        "type": "function",
        "function": {
            "name": "odd",
            "description": "Misbehaves.",
            "parameters": {
                "title": "Wait",
                "type": "object",
                "properties": {"seconds": {"type": "integer"}, "unit": {"type": "string", "default": "s"}},
                "required": ["seconds"],
                "additionalProperties": False,
            },
        },
    }


# -- the calculator
def calculated(expression):
    return told(Call("calculator", {"expression": expression}), Calculator())


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("384*592", "227328"),
        (" (1 + 2) * -3 ", "-9"),
        ("7/2", "3.5"),
        ("7//2 + 7%2", "4"),
        ("0.1 + 0.2", "0.3"),  # exact, unlike a sum of floats
        ("1/3", "0.333333333333"),
        ("+2 - -2", "4"),
        ("9" * 60 + "*10", "9" * 60 + "0"),
    ],
)
def test_the_calculator_calculates(expression, value):
    assert calculated(expression) == Answer(value)


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1+",
        "1/0",
        "1%0",
        "2**9999999",
        "9<<99",
        "abs(1)",
        "x",
        "'1'*9",
        "True+1",
        "1j",
        "1e999",
        "[1][0]",
        "(1,)",
        "1 if 1 else 2",
        "__import__('os').system('true')",
        "(" * 150 + "1",
        "-" * 190 + "1+",
        "1+" * 200 + "1",
        "1e308*" * 33 + "1",
        "1\x00",
        "\udcff",
    ],
)
def test_the_calculator_refuses_what_is_no_arithmetic(expression):
    assert calculated(expression).failed


EXPRESSIONS = st.recursive(
    st.integers(0, 99).map(lambda n: (str(n), Fraction(n))),
    lambda inner: st.tuples(st.sampled_from("+-*"), inner, inner).map(
        lambda t: (
            f"({t[1][0]}{t[0]}{t[2][0]})",
            {"+": t[1][1] + t[2][1], "-": t[1][1] - t[2][1], "*": t[1][1] * t[2][1]}[t[0]],
        )
    ),
    max_leaves=12,
)


@given(EXPRESSIONS)
def test_the_calculator_is_exact(pair):
    text, value = pair
    assert Calculator().call(Calculator.arguments(text)) == str(value)


# -- the loop
class Questions:
    """A dialect of letters: each ? in a turn calls the tool named by the letter after it."""

    end = "^"

    def calls(self, text):
        return [Call(part[:1], {"seconds": len(part)}) for part in text.split("?")[1:]]

    def observation(self, answers):
        return "".join(f"<{one.text}>" for one in answers)


class Tool(Odd):
    name = "t"


class Scripted:
    """An engine with a script of texts for each session, one per turn.

    `.` is the end-of-sequence token, a final `/` aborts the turn, and a final `|` stands for a stop
    string that ended it.
    """

    def __init__(self, *scripts, versions=None):
        self.scripts = [list(script) for script in scripts]
        self.versions = versions or [3]
        self.weight_version = 3
        self.calls = []

    async def generate(self, requests, params):
        self.calls.append([(r.uid, LETTERS.decode(r.prompt_ids), params.max_new_tokens) for r in requests])
        self.weight_version = self.versions.pop(0) if len(self.versions) > 1 else self.versions[0]
        return [self.one(request, params.max_new_tokens) for request in requests]

    def one(self, request, budget):
        text = self.scripts[int(request.uid[1])].pop(0)
        ids = [EOS if letter == "." else ord(letter) for letter in text.rstrip("/|")]
        reason = "abort" if text.endswith("/") else "stop" if text.endswith((".", "|")) else "length"
        assert len(ids) <= budget
        return Generation(
            response_ids=tuple(ids),
            log_probs=tuple(-len(request.prompt_ids) - i / 8 for i in range(len(ids))),
            finish_reason=reason,
            weight_version=self.weight_version,
        )


def agent(**limits):
    return SessionKind(
        ToolAgent([ToolKind(lambda: Tool(lambda a: "ok" * a.seconds))], Questions(), Limits(**limits)).run
    )


def play(kind, engine, length=40, tokenizer=LETTERS, stop=()):
    refs = [
        SessionRef(f"p{i}", 0, PromptRow(prompt_ids=tuple(map(ord, "ab")), data_source="d", ground_truth=""))
        for i in range(len(engine.scripts))
    ]
    sampling = SamplingParams(max_new_tokens=length, stop=stop)
    return asyncio.run(run_sessions(kind, refs, engine, sampling, tokenizer))


def text(trajectory):
    """Return the trajectory as text, with tokens that the policy did not make in capitals."""
    letters = ("." if token == EOS else chr(token) for token in trajectory.response_ids)
    return "".join(
        letter if made else letter.upper() for letter, made in zip(letters, trajectory.response_mask, strict=True)
    )


def test_a_turn_that_a_stop_string_ended_is_closed_before_the_answer():
    """What the model did not write is put there, and not trained on; a turn with an end has it."""
    ((one,),) = play(agent(), Scripted(["x?t|", "yz."]), stop=("?t",))
    assert text(one) == "x?t^<OK>yz."
    ((one,),) = play(agent(), Scripted(["x?t.", "yz."]), stop=("other",))
    assert text(one) == "x?t.<OK>yz."


def test_a_stop_string_that_an_update_cut_in_two_ends_the_turn():
    """`?t` is completed by the continuation, whose further letters are dropped."""
    ((one,),) = play(agent(), Scripted(["x?/", "tab.", "yz."], versions=[3, 4, 5]), stop=("?t",))
    assert text(one) == "x?t^<OK>yz."
    assert one.versions == ((3, 2), (4, 6), (5, 3))


def test_a_session_ends_single_turns_with_strings_of_its_own():
    """Calls with different strings are generated apart, each with those of the run."""

    async def run(row, generate):
        transcript = Transcript(row.prompt_ids, generate)
        await transcript.turn(stop=("b",) if row.prompt_ids[-1] == ord("b") else ())
        return [transcript.trajectory()]

    asked = []

    class Asked(Scripted):
        async def generate(self, requests, params):
            asked.append((len(requests), params.stop))
            return await super().generate(requests, params)

    play(SessionKind(run), Asked(["x."], ["y."]), stop=("run",))
    assert asked == [(2, ("run", "b"))]
    with pytest.raises(ConfigError, match="stop must have no empty strings"):
        play(SessionKind(lambda row, generate: generate(row.prompt_ids, stop=("",))), Asked(["x."]))


def test_a_trajectory_is_the_tokens_as_they_were_sampled_and_what_was_told_in_between():
    engine = Scripted(["x?t.", "yz."])
    ((one,),) = play(agent(), engine)
    assert text(one) == "x?t.<OK>yz."
    assert one.response_ids == (*map(ord, "x?t"), EOS, *map(ord, "<ok>yz"), EOS)
    assert one.response_mask == (*[True] * 4, *[False] * 4, *[True] * 3)
    # The scripted log-prob of a token is -(context length of its turn) - position / 8; observation
    # tokens have 0.
    assert one.log_probs == (-2.0, -2.125, -2.25, -2.375, 0.0, 0.0, 0.0, 0.0, -10.0, -10.125, -10.25)
    assert one.weight_version == 3
    assert one.stats == RolloutStats(turns=2, tool_calls=1, tool_errors=0, finish="stop")
    assert engine.calls == [[("p0", "ab", 40)], [("p0/turn1", "abx?t<ok>", 32)]]


def raises(arguments):
    raise OSError(b"caf\xe9".decode("utf-8", "surrogateescape"))


@pytest.mark.parametrize(
    ("act", "seen"),
    [(lambda _: b"caf\xe9".decode("utf-8", "surrogateescape"), "CAF?"), (raises, "ERROR: T: OSERROR: CAF?")],
)
def test_an_answer_of_bytes_that_are_no_utf8_has_question_marks_in_their_place(act, seen):
    letters = Tokenizer(encode=lambda text: list(text.encode()), decode=LETTERS.decode)  # refuses surrogates
    kind = SessionKind(ToolAgent([ToolKind(lambda: Tool(act))], Questions()).run)
    ((one,),) = play(kind, Scripted(["x?t.", "yz."]), tokenizer=letters)
    assert text(one) == f"x?t.<{seen}>yz."


def test_a_turn_aborted_by_a_weight_update_continues_with_the_new_weights():
    engine = Scripted(["x?/", "/", "t.", "z."], versions=[3, 4, 5, 6])
    ((one,),) = play(agent(turn_tokens=9), engine)
    assert text(one) == "x?t.<OK>z."
    assert one.log_probs == (-2.0, -2.125, -4.0, -4.125, 0.0, 0.0, 0.0, 0.0, -10.0, -10.125)
    assert one.weight_version == 3  # the oldest version of its tokens
    assert one.stats == RolloutStats(turns=2, tool_calls=1, finish="stop")
    budgets = [(context, budget) for ((_, context, budget),) in engine.calls]
    # the budget is per turn, not per request
    assert budgets == [("ab", 9), ("abx?", 7), ("abx?", 7), ("abx?t<ok>", 9)]


def test_the_oldest_version_need_not_be_the_first():
    """A lagging replica answers the second turn."""
    ((one,),) = play(agent(), Scripted(["?t.", "z."], versions=[5, 4]))
    assert one.weight_version == 4


@pytest.mark.parametrize(
    ("limits", "length", "script", "written", "course"),
    [
        ({}, 40, ["x."], "x.", RolloutStats(turns=1)),
        ({"turns": 2}, 40, ["?t.", "?t."], "?t.<OK>?t.", RolloutStats(turns=2, tool_calls=1, finish="turns")),
        ({"turns": 1}, 40, ["?t."], "?t.", RolloutStats(turns=1, finish="turns")),
        ({"turns": 1}, 40, ["x."], "x.", RolloutStats(turns=1, finish="stop")),
        # a turn that was cut off calls no tool
        (
            {"turn_tokens": 2},
            40,
            ["?t"],
            "?t",
            RolloutStats(turns=1, finish="turn_length"),
        ),
        ({}, 4, ["x?tt"], "x?tt", RolloutStats(turns=1, finish="response_length")),
        ({"turn_tokens": 4}, 4, ["x?tt"], "x?tt", RolloutStats(turns=1, finish="response_length")),
        ({"turn_tokens": 4}, 4, ["x?/", "tt/"], "x?tt", RolloutStats(turns=1, finish="response_length")),
        # no room to continue after the observation
        (
            {},
            7,
            ["?t."],
            "?t.",
            RolloutStats(turns=1, tool_calls=1, finish="response_length"),
        ),
        ({}, 8, ["?t.", "x"], "?t.<OK>x", RolloutStats(turns=2, tool_calls=1, finish="response_length")),
        ({"observation_tokens": 4}, 40, ["?t.", "x."], "?t.<OK>x.", RolloutStats(turns=2, tool_calls=1)),
        (
            {"observation_tokens": 7},
            40,
            ["?t.", "?t."],
            "?t.<OK>?t.",
            RolloutStats(turns=2, tool_calls=2, finish="observation_length"),
        ),
        ({"answer_chars": 3}, 40, ["?txx.", "x."], "?txx.<OKO...>x.", RolloutStats(turns=2, tool_calls=1)),
        ({}, 40, ["?t?txx.", "x."], "?t?txx.<OK><OKOKOK>x.", RolloutStats(turns=2, tool_calls=2)),
        (
            {"answer_chars": 9},
            60,
            ["?u?t.", "x."],
            "?u?t.<ERROR: TH...><OK>x.",
            RolloutStats(turns=2, tool_calls=2, tool_errors=1),
        ),
        ({}, 40, ["/"] * (MAX_ABORTS + 1), "", RolloutStats(turns=1, finish="abort")),
        ({}, 40, ["/"] * MAX_ABORTS + ["x."], "x.", RolloutStats(turns=1)),
    ],
)
def test_every_limit_has_a_reason_of_its_own(limits, length, script, written, course):
    ((one,),) = play(agent(**limits), Scripted(script), length)
    assert (text(one), one.stats) == (written, course)


def test_sessions_take_their_turns_together():
    """Sessions that call tools at the same time continue in one batch."""
    engine = Scripted(["?t.", "a."], ["x."], ["?t?txx.", "?t.", "b."])
    out = play(agent(turn_tokens=9), engine)
    assert [text(one) for (one,) in out] == ["?t.<OK>a.", "x.", "?t?txx.<OK><OKOKOK>?t.<OK>b."]
    assert [[uid for uid, *_ in call] for call in engine.calls] == [
        ["p0", "p1", "p2"],
        ["p0/turn1", "p2/turn1"],
        ["p2/turn2"],
    ]


def test_a_custom_loop_may_restart_its_context():
    async def plan_then_do(row, generate):
        plan = Transcript(row.prompt_ids, generate)
        await plan.turn(4)
        work = Transcript(row.prompt_ids, generate)
        work.observe(LETTERS.encode("do:"))
        last = await work.turn()
        assert last.response_ids == (*map(ord, "yes"), EOS)
        return [plan.trajectory(), work.trajectory(RolloutStats(turns=2))]

    engine = Scripted(["plan", "yes."])
    ((first, second),) = play(SessionKind(plan_then_do), engine)
    assert (text(first), text(second)) == ("plan", "DO:yes.")
    assert second.log_probs == (0.0, 0.0, 0.0, -5.0, -5.125, -5.25, -5.375)
    assert engine.calls[1] == [("p0/turn1", "abdo:", 37)]


def test_log_probs_are_those_of_the_policy_at_the_same_places():
    """Every sampled token has the policy's log-prob in its own context.

    The engine and the policy of rl_protocol.testing share one table of logits.
    """

    class Echo:
        calls = staticmethod(lambda text: [Call("t", {"seconds": 1})])
        observation = staticmethod(lambda answers: "".join(one.text for one in answers))

    tokenizer = Tokenizer(encode=lambda text: [2 + ord(letter) % 6 for letter in text], decode=lambda ids: "same")
    kind = SessionKind(ToolAgent([ToolKind(lambda: Tool(lambda a: "abc"))], Echo(), Limits(turns=4, turn_tokens=8)).run)
    refs = [
        SessionRef(f"p{i}", 0, PromptRow(prompt_ids=(2 + i % 6,), data_source="d", ground_truth="")) for i in range(32)
    ]
    out = asyncio.run(run_sessions(kind, refs, BigramEngine(), SamplingParams(max_new_tokens=30), tokenizer))
    rows = [one for (one,) in out]
    assert max(one.stats.turns for one in rows) == 4
    data = BatchData(
        {
            "prompts": ragged([ref.row.prompt_ids for ref in refs], "int64"),
            "responses": ragged([one.response_ids for one in rows], "int64"),
        }
    )
    recomputed = BigramPolicy().compute_log_probs(data, temperature=1.0).ragged("log_probs").rows()
    made = np.concatenate([one.response_mask for one in rows])
    found = np.concatenate([one.log_probs for one in rows])
    assert apart(found[made], np.concatenate(recomputed)[made]) < 1e-6
    assert not found[~made].any()


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match=r"different names; got .* out of AgentConfig\.tools"):
        ToolAgent([ToolKind(Calculator)] * 2, Hermes())
    for name, value in (("turns", 0), ("turn_tokens", -1), ("answer_chars", 0), ("call_timeout_s", 0.0)):
        with pytest.raises(ConfigError, match=rf"^{name} must be"):
            Limits(**{name: value})
    with pytest.raises(ConfigError, match="tokenizer"):
        play(agent(), Scripted(["x."]), tokenizer=None)


def test_an_engine_that_fails_in_a_later_turn_ends_all_sessions():
    class Broken(Scripted):
        async def generate(self, requests, params):
            if self.calls:
                raise RolloutError("no memory")
            return await super().generate(requests, params)

    with pytest.raises(RolloutError, match="no memory"):
        play(agent(), Broken(["?t.", "x."], ["?t.", "x."]))


# -- metrics
def test_the_course_of_a_session_is_counted_once():
    tags = {
        "a/0/0": RolloutStats(turns=2, tool_calls=1, finish="turns"),
        "a/0/1": RolloutStats(turns=1, tool_calls=1, tool_errors=1, finish="stop"),
        "a/1/0": RolloutStats(turns=1, finish="turn_length"),
        "b/0/0": None,
    }
    rows = KVBatchMeta(
        partition="train",
        keys=tuple(tags),
        tags=tuple({"step": 1} | (one.tags() if one else {}) for one in tags.values()),
    )
    assert rollout_metrics(rows) == {
        "num_turns/mean": 2.0,
        "num_turns/max": 3.0,
        "num_turns/min": 1.0,
        "agent/tool_calls/mean": 1.0,
        "agent/tool_calls/max": 2.0,
        "agent/tool_calls/min": 0.0,
        "agent/tool_errors/mean": 0.5,
        "agent/tool_errors/max": 1.0,
        "agent/tool_errors/min": 0.0,
        "rollout/forks/mean": 0.5,
        "rollout/forks/max": 1.0,
        "rollout/forks/min": 0.0,
        "agent/finish/stop": 0.5,
        "agent/finish/turn_length": 0.5,
    }
    assert rollout_metrics(rows.select_keys(["b/0/0"])) == {}
    assert rollout_metrics(rows.without_tags()) == {}
