"""The dialect `qwen3_coder`: calls as XML, with the values of arguments as plain text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rl_trainer.rollout.agents.dialects.base import CHATML, Answer, Call, Malformed, Markup


@dataclass(frozen=True, slots=True)
class Qwen3Coder:
    r"""`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>..</function></tool_call>`, as
    often as wanted, among other text. A value is the text between its tags, without one line break
    at either end.

    >>> call = "<function=add><parameter=a>\n1\n</parameter></function>"
    >>> Qwen3Coder().calls(f"<tool_call>{call}</tool_call>")
    [Call(tool='add', arguments={'a': '1'}, as_text=True)]
    """

    markup: Markup = CHATML

    @property
    def end(self) -> str:
        return self.markup.end

    @property
    def text_end(self) -> str:
        return self.end

    def calls(self, text: str) -> list[Call | Malformed]:
        return [_call(part) for part in text.split("<tool_call>")[1:]]

    def observation(self, answers: Sequence[Answer]) -> str:
        told = [f"<tool_response>\n{answer.text}\n</tool_response>\n" for answer in answers]
        return self.markup.around("".join(told))

    def message(self, text: str) -> str:
        return self.markup.around(text)


def _call(part: str) -> Call | Malformed:
    body, end, _ = part.partition("</tool_call>")
    if not end:
        return Malformed("<tool_call> is not followed by </tool_call>")
    body = body.strip()
    if not (body.startswith("<function=") and body.endswith("</function>")):
        return Malformed("<tool_call> must contain <function=NAME>..</function>, and nothing else")
    name, closed, inside = body.removeprefix("<function=").removesuffix("</function>").partition(">")
    before, *parameters = inside.split("<parameter=")
    if not closed or before.strip():
        return Malformed("<function=NAME> must contain <parameter=KEY>VALUE</parameter>, and nothing else")
    arguments: dict[str, str] = {}
    for parameter in parameters:
        key, closed, rest = parameter.partition(">")
        value, ended, after = rest.partition("</parameter>")
        if not closed or not ended or after.strip():
            return Malformed(f"<parameter={key[:40]}> must be <parameter=KEY>VALUE</parameter>")
        arguments[key.strip()] = value.removeprefix("\n").removesuffix("\n")
    return Call(name.strip(), arguments, as_text=True)
