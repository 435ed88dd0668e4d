"""How models of two families talk to the calculator of the demo.

Each has a chat template in the form of the family's own, and a dialect. Texts that never change,
such as the description of the tool, are single tokens, so that a small model can learn them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from rl_app_ppo.demo.tokenizer import EOS, VOCABULARY
from rl_trainer.rollout.agents import DIALECTS, Answer, Calculator, described

TOOL = described(Calculator())
_SCHEMA = json.dumps(TOOL, ensure_ascii=False)
"""As chat templates write it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A chat template and the dialect of its models."""

    dialect: str
    """Name in DIALECTS."""
    template: str
    end: str
    """Ends a turn."""
    words: tuple[str, ...]
    """Texts that are tokens."""
    call: tuple[str, str]
    """What stands before and after the expression in a call; two further tokens."""

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """Tokens by id; `end` takes the place of EOS."""
        return (*(self.end if token == EOS else token for token in VOCABULARY), "*", *self.words, *self.call)

    def written(self, expression: str) -> str:
        """The call of the calculator with this expression."""
        return expression.join(self.call)

    def observation(self, answer: str) -> str:
        """What follows the turn of a call that is answered so."""
        return DIALECTS[self.dialect].observation([Answer(answer)])


_QWEN_SYSTEM = 'Call a tool as <tool_call>{"name": .., "arguments": {..}}</tool_call>. Tools:'
QWEN = Chat(
    dialect="hermes",
    template=(
        "{% if tools %}<|im_start|>system\n"
        + _QWEN_SYSTEM
        + "\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    end="<|im_end|>",
    words=(
        f"<|im_start|>system\n{_QWEN_SYSTEM}\n{_SCHEMA}",
        "<|im_start|>user\n",
        "\n<|im_start|>user\n",
        "\n<|im_start|>assistant\n",
        "\n<|im_start|>user\n<tool_response>\n",
        "\n</tool_response>",
    ),
    call=('<tool_call>\n{"name": "calculator", "arguments": {"expression": "', '"}}\n</tool_call>'),
)

_LLAMA_SYSTEM = 'Environment: ipython\nCall a tool as {"name": .., "parameters": {..}}. Tools:'
_LLAMA_HEADS = {
    role: f"<|start_header_id|>{role}<|end_header_id|>\n\n" for role in ("system", "user", "assistant", "ipython")
}
LLAMA3 = Chat(
    dialect="llama3_json",
    template=(
        "{% if tools %}"
        + _LLAMA_HEADS["system"]
        + _LLAMA_SYSTEM
        + "\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|eot_id|>{% endif %}"
        "{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n{{ message.content }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}" + _LLAMA_HEADS["assistant"] + "{% endif %}"
    ),
    end="<|eot_id|>",
    words=(
        f"{_LLAMA_HEADS['system']}{_LLAMA_SYSTEM}\n{_SCHEMA}",
        *(_LLAMA_HEADS[role] for role in ("user", "assistant", "ipython")),
        '"',
    ),
    call=('{"name": "calculator", "parameters": {"expression": "', '"}}'),
)
