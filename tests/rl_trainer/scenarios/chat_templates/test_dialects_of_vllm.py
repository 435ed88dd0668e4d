"""The dialects of tool calls find what vLLM's tool parsers of the same names find."""

from __future__ import annotations

import json

import pytest

from rl_trainer.rollout.agents import DIALECTS

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]  # for vLLM's own warnings

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "metric": {"type": "boolean"}},
            },
        },
    }
]
ARGUMENTS = '{"name": "weather", "arguments": {"city": "Dallas", "days": 3, "metric": true}}'
PARAMETERS = ARGUMENTS.replace("arguments", "parameters")
CODER = (
    "<function=weather>\n<parameter=city>\nDallas\n</parameter>\n<parameter=metric>\nwarm\n</parameter>\n</function>"
)
JSON = '{"city": "Dallas", "days": 3, "metric": true}'
DEEPSEEK = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{JSON}\n```<｜tool▁call▁end｜>"
KIMI = f"<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{JSON}<|tool_call_end|>"
TURNS = [
    ("hermes", f"<tool_call>\n{ARGUMENTS}\n</tool_call>"),
    ("hermes", f"I look.\n<tool_call>{ARGUMENTS}</tool_call>\n<tool_call>{ARGUMENTS}</tool_call>"),
    ("llama3_json", PARAMETERS),
    ("llama3_json", ARGUMENTS),
    ("llama3_json", f"<|python_tag|>{PARAMETERS}; {PARAMETERS}"),
    ("pythonic", "[weather(city='Dallas', days=3, metric=True)]"),
    ("pythonic", "[weather(city='Dallas', days=-1), weather(city=\"x]\", metric=False)]"),
    ("qwen3_coder", f"I look.\n<tool_call>\n{CODER}\n</tool_call>"),
    ("mistral", '[TOOL_CALLS]weather{"city": "Dallas", "days": 3, "metric": true}'),
    ("deepseek_v3", f"I look.<｜tool▁calls▁begin｜>{DEEPSEEK}\n{DEEPSEEK}<｜tool▁calls▁end｜>"),
    ("kimi_k2", f"I look.<|tool_calls_section_begin|>{KIMI}{KIMI}<|tool_calls_section_end|>"),
    *((name, "It is warm.") for name in ("hermes", "llama3_json", "pythonic", "qwen3_coder", "mistral", "deepseek_v3")),
]


class Tokenizer:
    """Has the tokens that the parsers look for."""

    def get_vocab(self):
        names = (
            *("<|python_tag|>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]"),
            *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
            "<|tool_call_argument_begin|>",
        )
        return {name: number for number, name in enumerate(names)}

    def encode(self, text, **_):
        return [0]


@pytest.mark.parametrize(("name", "text"), TURNS)
def test_a_dialect_finds_the_calls_that_vllm_finds(name, text):
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    request = ChatCompletionRequest(messages=[{"role": "user", "content": "?"}], model="m", tools=TOOLS)
    found = ToolParserManager.get_tool_parser(name)(Tokenizer(), request.tools).extract_tool_calls(text, request)
    theirs = [(call.function.name, json.loads(call.function.arguments)) for call in found.tool_calls]
    ours = [(call.tool, dict(call.arguments)) for call in DIALECTS[name].calls(text)]
    if name == "qwen3_coder":  # ours are texts until the tool's types read them
        theirs = [(tool, {key: str(value) for key, value in values.items()}) for tool, values in theirs]
    assert ours == theirs
    assert bool(ours) == (text != "It is warm.")
