"""The dialect `glm45`: calls as XML with a pair of tags for each argument."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rl_trainer.rollout.agents.dialects.base import Answer, Call, Malformed

_ARGUMENT = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_NAME = re.compile(r"\s*([\w.-]+)\s*")


@dataclass(frozen=True, slots=True)
class GLM45:
    r"""`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>..</tool_call>`, as often
    as wanted, among other text. GLM-4.5 has a line break between the parts, GLM-4.7 has none.

    >>> GLM45().calls("<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>")
    [Call(tool='add', arguments={'a': '1'}, as_text=True)]
    """

    @property
    def end(self) -> str:
        """What follows a call: the model ends a turn with the mark of the next one."""
        return "<|observation|>"

    @property
    def text_end(self) -> str:
        return "<|user|>"

    def calls(self, text: str) -> list[Call | Malformed]:
        return [_call(part) for part in text.split("<tool_call>")[1:]]

    def observation(self, answers: Sequence[Answer]) -> str:
        told = [f"\n<tool_response>\n{one.text}\n</tool_response>" for one in answers]
        return "".join(told) + "<|assistant|>"

    def message(self, text: str) -> str:
        return f"\n{text}<|assistant|>"


def _call(part: str) -> Call | Malformed:
    body, end, _ = part.partition("</tool_call>")
    name = _NAME.match(body)
    if not end or name is None:
        return Malformed("a call is <tool_call>NAME, its arguments and </tool_call>")
    arguments: dict[str, str] = {}
    place = name.end()
    while body[place:].strip():
        found = _ARGUMENT.match(body, place)
        if found is None:
            return Malformed("an argument is <arg_key>KEY</arg_key><arg_value>VALUE</arg_value>")
        arguments[found[1].strip()] = found[2]
        place = found.end()
    return Call(name[1], arguments, as_text=True)
