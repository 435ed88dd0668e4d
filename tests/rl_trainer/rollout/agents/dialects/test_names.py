"""Dialects by name, on calls as models write them and answers as chat templates write them."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_protocol import ConfigError
from rl_trainer.config import RolloutConfig
from rl_trainer.config.agent import DIALECT_NAMES
from rl_trainer.rollout.agents import DIALECTS, AgentConfig, Answer, Call, Malformed, ToolAgent
from rl_trainer.rollout.agents.dialects.names import dialect_of_template
from rl_trainer.rollout.agents.named import configured_agent
from rl_trainer.rollout.agents.tools import answer
from rl_trainer.rollout.session_kinds import session_kind
from rl_trainer.rollout.session_turns import SINGLE_TURN

DALLAS = {"city": "Dallas", "state": "TX", "unit": "fahrenheit"}
WEATHER = Call("get_current_weather", DALLAS)
QWEN3_CODER = """I look it up.
<tool_call>
<function=get_current_weather>
<parameter=city>
Dallas
</parameter>
<parameter=state>
TX
</parameter>
<parameter=unit>
fahrenheit
</parameter>
</function>
</tool_call>"""
HERMES_JSON = '{"name": "get_current_weather", "arguments": {"city": "Dallas", "state": "TX", "unit": "fahrenheit"}}'
LLAMA_JSON = HERMES_JSON.replace("arguments", "parameters")
GLM = "get_current_weather" + "".join(
    f"\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>" for key, value in DALLAS.items()
)
ARGUMENTS = '{"city": "Dallas", "state": "TX", "unit": "fahrenheit"}'
DEEPSEEK = "function<｜tool▁sep｜>get_current_weather\n```json\n" + ARGUMENTS + "\n```<｜tool▁call▁end｜>"
KIMI = "functions.get_current_weather:0<|tool_call_argument_begin|>" + ARGUMENTS + "<|tool_call_end|>"
PYTHON = "get_current_weather(city='Dallas', state='TX', unit='fahrenheit')"


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("hermes", f"<tool_call>\n{HERMES_JSON}\n</tool_call>", [WEATHER]),
        ("qwen3_coder", QWEN3_CODER, [Call(WEATHER.tool, DALLAS, as_text=True)]),
        ("qwen3_coder", QWEN3_CODER * 2, [Call(WEATHER.tool, DALLAS, as_text=True)] * 2),
        (
            "qwen3_coder",
            "<tool_call>\n<function=write>\n<parameter=code>\n\nif a < b:\n    pass\n</parameter>\n</function>\n</tool_call>",
            [Call("write", {"code": "\nif a < b:\n    pass"}, as_text=True)],
        ),
        ("qwen3_coder", "<tool_call><function=now></function></tool_call>", [Call("now", as_text=True)]),
        ("qwen3_coder", "<tool_call><function=now></tool_call>", ["must contain <function=NAME>"]),
        ("qwen3_coder", "<tool_call><function=now></function>", ["not followed by </tool_call>"]),
        ("qwen3_coder", "<tool_call><function=now>x</function></tool_call>", ["must contain <parameter=KEY>"]),
        (
            "qwen3_coder",
            "<tool_call><function=now><parameter=a>1</function></tool_call>",
            ["must be <parameter=KEY>VALUE"],
        ),
        ("qwen3_coder", "It is warm.", []),
        ("llama3_json", LLAMA_JSON, [WEATHER]),
        ("llama3_json", f"<|python_tag|>{LLAMA_JSON}", [WEATHER]),
        ("llama3_json", HERMES_JSON, [WEATHER]),
        ("llama3_json", f"{LLAMA_JSON}; {LLAMA_JSON}", [WEATHER, WEATHER]),
        ("llama3_json", '{"name": "now", "parameters": {}}', [Call("now")]),
        ("llama3_json", '{"answer": 3}', []),
        ("llama3_json", "It is warm.", []),
        ("llama3_json", LLAMA_JSON[:-1], ["not JSON"]),
        ("llama3_json", f"{LLAMA_JSON} and", [WEATHER, "not JSON"]),
        ("llama3_json", '{"name": "now", "parameters": [1]}', ["$.parameters"]),
        ("mistral", f"[TOOL_CALLS][{HERMES_JSON}]", [WEATHER]),
        ("mistral", f'[TOOL_CALLS] [{HERMES_JSON[:-1]}, "id": "9Fz0sC3aB"}}]', [WEATHER]),
        ("mistral", f"Let me see.[TOOL_CALLS][{HERMES_JSON}, {HERMES_JSON}]", [WEATHER, WEATHER]),
        ("mistral", f"[{HERMES_JSON}]", [WEATHER]),  # decoding left the special token out
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 3.5, "b": 4}', [Call("add", {"a": 3.5, "b": 4})]),
        ("mistral", '[TOOL_CALLS]add{"a": 1}[TOOL_CALLS]now{}', [Call("add", {"a": 1}), Call("now")]),
        ("mistral", 'add{"a": 1}now{}', [Call("add", {"a": 1}), Call("now")]),
        ("mistral", "[TOOL_CALLS]", ["not followed by a call"]),
        ("mistral", '[TOOL_CALLS]add{"a": ', ["not JSON"]),
        ("mistral", "[TOOL_CALLS]add", ["a call is NAME{..}"]),
        ("mistral", "It is warm.", []),
        ("pythonic", f"[{PYTHON}]", [WEATHER]),
        ("pythonic", f"<|python_start|>[{PYTHON}, now()]<|python_end|>", [WEATHER, Call("now")]),
        (
            "pythonic",
            "[register_user(name='Doe', age=-9, address={'city': 'SF'}, role=None, passed=true, tags=['a', 1.5])]",
            [
                Call(
                    "register_user",
                    {
                        "name": "Doe",
                        "age": -9,
                        "address": {"city": "SF"},
                        "role": None,
                        "passed": True,
                        "tags": ["a", 1.5],
                    },
                )
            ],
        ),
        ("pythonic", "[files.read(path='a')]", [Call("files.read", {"path": "a"})]),
        ("pythonic", "[files().read(path='a')]", ["is no call"]),
        ("pythonic", f"[{'a.' * 900}b(path='a')]", [Call("a." * 900 + "b", {"path": "a"})]),
        ("pythonic", "[add(1, 2)]", ["arguments must have names"]),
        ("pythonic", "[add(a=1 + 1)]", ["add: the value of an argument must be a literal"]),
        ("pythonic", "[add(a=__import__('os').system('true'))]", ["must be a literal"]),
        ("pythonic", "[add(**{'a': 1})]", ["arguments must have names"]),
        ("pythonic", "[add(a=1), 3]", [Call("add", {"a": 1}), "is no call"]),
        ("pythonic", "[add(a=1)", ["no list of calls"]),
        ("pythonic", "[add(a=1)][0]", ["must be a list of calls"]),
        ("pythonic", "[add(a={[1]: 2})]", ["must be a literal"]),
        ("pythonic", r"[grep(pattern='\d+')]", [Call("grep", {"pattern": r"\d+"})]),
        ("glm45", f"I look.\n<tool_call>{GLM}\n</tool_call>", [Call(WEATHER.tool, DALLAS, as_text=True)]),
        (
            "glm45",
            f"<tool_call>{GLM}</tool_call>".replace("\n", "") * 2,
            [Call(WEATHER.tool, DALLAS, as_text=True)] * 2,
        ),
        ("glm45", "<tool_call>now</tool_call>", [Call("now", as_text=True)]),
        ("glm45", "<tool_call>now", ["a call is <tool_call>NAME"]),
        ("glm45", "<tool_call>now<arg_key>a</arg_key></tool_call>", ["an argument is <arg_key>"]),
        ("glm45", "It is warm.", []),
        (
            "deepseek_v3",
            f"I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{DEEPSEEK}\n<｜tool▁call▁begin｜>{DEEPSEEK}<｜tool▁calls▁end｜>",
            [WEATHER, WEATHER],
        ),
        ("deepseek_v3", f"<｜tool▁call▁begin｜>{DEEPSEEK[:-20]}", ["a call is"]),
        ("deepseek_v3", f"<｜tool▁call▁begin｜>{DEEPSEEK.replace('{', '[')}", ["are not a JSON object"]),
        ("deepseek_v3", "It is warm.", []),
        (
            "kimi_k2",
            f"I look.<|tool_calls_section_begin|><|tool_call_begin|>{KIMI}<|tool_call_begin|>{KIMI}<|tool_calls_section_end|>",
            [WEATHER, WEATHER],
        ),
        ("kimi_k2", "<|tool_call_begin|>now<|tool_call_argument_begin|>{}<|tool_call_end|>", ["functions.NAME:NUMBER"]),
        ("kimi_k2", f"<|tool_call_begin|>{KIMI.replace('}', '')}", ["are not a JSON object"]),
        ("kimi_k2", "It is warm.", []),
        (
            "openai",
            "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.get_current_weather "
            f"<|constrain|>json<|message|>{ARGUMENTS}<|call|>",
            [WEATHER],
        ),
        (
            "openai",  # decoding left the special tokens out
            f"analysisI look.assistantcommentary to=functions.get_current_weather json{ARGUMENTS}",
            [WEATHER],
        ),
        (
            "openai",
            "<|start|>assistant to=functions.get_current_weather<|channel|>commentary json<|message|>" + ARGUMENTS,
            [WEATHER],
        ),
        ("openai", " to=functions.get_current_weather<|channel|>commentary json<|message|>" + ARGUMENTS, [WEATHER]),
        ("openai", f" to=functions.get_current_weathercommentary json{ARGUMENTS}", [WEATHER]),
        (
            "openai",
            f"analysisI look.<|start|>assistant to=functions.get_current_weathercommentary json{ARGUMENTS}",
            [WEATHER],
        ),
        ("openai", "commentary to=functions.add_commentary json{}", [Call("add_commentary")]),
        ("openai", "commentary to=functions.now json", ["a call is commentary to=functions.NAME"]),
        ("openai", "commentary to=functions.now json{", ["are not a JSON object"]),
        ("openai", "<|channel|>final<|message|>It is warm.", []),
        ("pythonic", "[1, 2]", []),
        ("pythonic", "It is warm.", []),
    ],
)
def test_calls_are_read_as_the_model_writes_them(name, text, found):
    calls = DIALECTS[name].calls(text)
    assert len(calls) == len(found)
    for call, want in zip(calls, found, strict=True):
        if isinstance(want, str):
            assert isinstance(call, Malformed)
            assert want in call.why
        else:
            assert call == want


@pytest.mark.parametrize(
    ("name", "observation"),
    [
        (
            "qwen3_coder",
            "\n<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\nwarm\n</tool_response>\n"
            "<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "llama3_json",
            '<|start_header_id|>ipython<|end_header_id|>\n\n"3"<|eot_id|>'
            '<|start_header_id|>ipython<|end_header_id|>\n\n"warm"<|eot_id|>'
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            "mistral",
            '[TOOL_RESULTS] {"content": "3", "call_id": "000000000"}[/TOOL_RESULTS]'
            '[TOOL_RESULTS] {"content": "warm", "call_id": "000000001"}[/TOOL_RESULTS]',
        ),
        (
            "glm45",
            "\n<tool_response>\n3\n</tool_response>\n<tool_response>\nwarm\n</tool_response><|assistant|>",
        ),
        (
            "deepseek_v3",
            "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>3<｜tool▁output▁end｜>\n"
            "<｜tool▁output▁begin｜>warm<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
        ),
    ],
)
def test_answers_look_as_the_chat_templates_write_them(name, observation):
    assert DIALECTS[name].observation([Answer("3"), Answer("warm")]) == observation


@pytest.mark.parametrize(
    ("name", "call", "observation"),
    [
        (
            "kimi_k2",
            f"<|tool_call_begin|>{KIMI}<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>",
            "<|im_system|>tool<|im_middle|>## Return of functions.get_current_weather:0\nerror: there is no tool "
            "'get_current_weather'; there are show<|im_end|>"
            "<|im_system|>tool<|im_middle|>## Return of functions.now:1\nerror: there is no tool 'now'; there are "
            "show<|im_end|><|im_assistant|>assistant<|im_middle|>",
        ),
        (
            "openai",
            'commentary to=functions.show json{"text": "x"}',
            "<|start|>functions.show to=assistant<|channel|>commentary<|message|>('x', 0, None, False, [])<|end|>"
            "<|start|>assistant",
        ),
    ],
)
def test_answers_repeat_the_id_of_their_call(name, call, observation):
    async def answered():
        return [await answer(one, {"show": Show()}, 60.0) for one in DIALECTS[name].calls(call)]

    assert DIALECTS[name].observation(asyncio.run(answered())) == observation


FRAGMENTS = (
    "<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>", ">", "[TOOL_CALLS]",
    "[ARGS]", "<|python_tag|>", "[add(", "a=", ")]", '{"name":', '"add"', ',"parameters":', "{", "}", "[", "]", '"',
    "<|tool_call_begin|>", "functions.a:1", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<arg_key>", "</arg_key>",
    "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "\n```json\n", "\n```", "<｜tool▁call▁end｜>", "commentary to=functions.", "<arg_value>",
    ";", "1e999", "\\u", "\\d", "\x00", "add",
)  # fmt: skip
HOSTILE = st.one_of(st.text(), st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=3))).map("".join))


@pytest.mark.parametrize("name", DIALECTS)
@given(text=HOSTILE)
def test_no_text_breaks_a_dialect(name, text):
    assert all(isinstance(one, Call | Malformed) for one in DIALECTS[name].calls(text))


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("text", ["[" * 50_000, '{"name":' * 50_000, "[add(a=" + "[" * 50_000, "add{" * 50_000])
def test_deep_nesting_breaks_no_dialect(name, text):
    assert all(isinstance(one, Malformed) for one in DIALECTS[name].calls(text))


class Arguments(msgspec.Struct, forbid_unknown_fields=True):
    text: str
    count: int = 0
    ratio: float | None = None
    exact: bool = False
    tags: list[str] = []


class Show:
    name, description, arguments = "show", "Shows its arguments.", Arguments

    def call(self, arguments: Any) -> str:
        return repr(msgspec.structs.astuple(arguments))


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        ({"text": "3"}, "('3', 0, None, False, [])"),
        (
            {"text": "null", "count": "3", "ratio": "0.5", "exact": "true", "tags": '["a"]'},
            "('null', 3, 0.5, True, ['a'])",
        ),
        ({"text": "x", "count": "three"}, "error: show: Expected `int`, got `str` - at `$.count`"),
        ({"text": "x", "count": "3.5"}, "error: show: Expected `int`, got `float` - at `$.count`"),
        ({"text": "x", "more": "3"}, "error: show: Object contains unknown field `more`"),
    ],
)
def test_texts_are_read_by_the_types_of_the_arguments(texts, told):
    """Calls of `qwen3_coder` say no types."""
    got = asyncio.run(answer(Call("show", texts, as_text=True), {"show": Show()}, 60.0))
    assert got.text == told


def optional(kind):
    return {"anyOf": [kind, {"type": "null"}]}


SCHEMA = {
    "type": "object",
    "properties": {
        "tags": optional({"type": "array", "items": {"type": "string"}}),
        "none": optional({"type": "integer"}),
        "name": optional({"type": "string"}),
        "point": {"$ref": "#/$defs/Point"},
        "level": optional({"$ref": "#/$defs/Level"}),
        "unit": {"enum": ["1", "2"]},
        "both": {"allOf": [{"type": "integer"}, {"minimum": 1}]},
        "any": True,
        "loop": {"$ref": "#/$defs/Loop"},
    },
    "$defs": {
        "Point": {"type": "object"},
        "Level": {"enum": [1, 2], "type": "integer"},
        "Loop": {"$ref": "#/$defs/Loop"},
    },
}
"""As pydantic writes the arguments of a tool of an MCP server."""


class Echo:
    name, description, arguments = "echo", "Shows its arguments.", SCHEMA

    def call(self, arguments: Any) -> str:
        return repr(arguments)


def test_texts_are_read_by_the_json_schema_of_the_arguments():
    texts = {
        "tags": '["a"]', "none": "null", "name": "null", "point": '{"x": 1}', "level": "2", "unit": "2", "both": "3",
        "any": "4", "loop": "5", "other": "6",
    }  # fmt: skip
    read = {**texts, "tags": ["a"], "none": None, "point": {"x": 1}, "level": 2, "both": 3}
    got = asyncio.run(answer(Call("echo", texts, as_text=True), {"echo": Echo()}, 60.0))
    assert got.text == repr(read)


def test_every_dialect_can_be_an_option():
    assert tuple(DIALECTS) == DIALECT_NAMES
    with pytest.raises(ConfigError, match=r"dialect must be one of auto, hermes, .*; got 'hermmes'.*'hermes'"):
        AgentConfig(dialect="hermmes")


QWEN = '<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>'
TOLD = {
    "hermes": QWEN,
    "qwen3_coder": "<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>",
    "llama3_json": """Environment: ipython\\n{{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}""",
    "mistral": "{{- '[TOOL_CALLS][' }}",
    "pythonic": "[func_name1(params_name1=params_value1), func_name2(params)]",
    "glm45": "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>",
    "deepseek_v3": "'<｜tool▁sep｜>' + tool['function']['name'] + '\\n' + '```json'",
    "kimi_k2": "<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>",
    "openai": "{{- '<|start|>assistant to=' }}{{- 'functions.' + tool_call.name + '<|channel|>commentary ' }}",
}
"""What chat templates of each dialect's models have."""


def test_the_chat_template_tells_the_dialect():
    assert {name: dialect_of_template(text) for name, text in TOLD.items()} == {name: name for name in DIALECTS}
    agent = configured_agent(AgentConfig(tools=("calculator",)), QWEN)
    assert [one["function"]["name"] for one in agent.session.tools] == ["calculator"]


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ messages }}", "tells none"),
        (QWEN + TOLD["mistral"], "fits hermes and mistral"),
    ],
)
def test_a_template_that_tells_no_dialect_or_several_is_refused(template, why):
    with pytest.raises(ConfigError, match=rf"AgentConfig\.dialect must be .* got auto, .* template {why}"):
        dialect_of_template(template)


def test_a_model_without_a_chat_template_is_refused():
    with pytest.raises(ConfigError, match=r"RolloutConfig\.session=tool_agent needs .* has no chat template"):
        dialect_of_template("")


def test_an_agent_needs_known_tools():
    with pytest.raises(ConfigError, match=r"AgentConfig\.tools must name at least one .*calculator"):
        configured_agent(AgentConfig(), QWEN)
    with pytest.raises(ConfigError, match=r"AgentConfig\.tools must be one of calculator; got 'calc'.*'calculator'"):
        configured_agent(AgentConfig(tools=("calc",)), QWEN)


def test_the_session_tool_agent_follows_from_the_settings():
    config = RolloutConfig(session="tool_agent", agent=AgentConfig(tools=("calculator",), dialect="mistral"))
    assert [one["function"]["name"] for one in session_kind(config, "").tools] == ["calculator"]
    assert session_kind(RolloutConfig(), "") is SINGLE_TURN
    with pytest.raises(ConfigError, match="single_turn"):
        session_kind(RolloutConfig(session="single_turn_agent"), "")


def test_an_unknown_dialect_is_refused():
    with pytest.raises(ConfigError, match="must be one of hermes, qwen3_coder, llama3_json, mistral, pythonic"):
        ToolAgent([], "deepseek_v9")
