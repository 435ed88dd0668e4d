"""How a policy writes tool calls, and how it reads answers. Nothing it writes is executed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from rl_protocol.errors import UNREADABLE


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call as the policy wrote it; neither the tool nor the arguments have been checked."""

    tool: str
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    as_text: bool = False
    """Whether the values are texts, to be read by the types of the tool's arguments."""
    id: str = field(default="", compare=False, repr=False)
    """What the answer must repeat, in dialects whose answers name their call."""


@dataclass(frozen=True, slots=True)
class Malformed:
    """Text that was meant as a call and can't be parsed."""

    why: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a call."""

    text: str
    failed: bool = False
    """Whether the text is an error message."""
    call_id: str = field(default="", compare=False, repr=False)
    """Of the call; empty: the dialect has none, or the call was unreadable."""


class Dialect(Protocol):
    """The format of calls and of their answers."""

    @property
    def end(self) -> str:
        """What ends a turn with calls; put after a turn that a stop string ended before it."""
        ...

    @property
    def text_end(self) -> str:
        """What ends a turn without calls, before `message`; put as `end`."""
        ...

    def calls(self, text: str) -> Sequence[Call | Malformed]:
        """The calls in one turn of the policy, in order. None: the turn is its final answer. Never
        raises.
        """
        ...

    def observation(self, answers: Sequence[Answer]) -> str:
        """The answers, at least one, with all text between the end of that turn and the next."""
        ...

    def message(self, text: str) -> str:
        """A message of the user, with all text between the end of a turn and the next."""
        ...


@dataclass(frozen=True, slots=True)
class Markup:
    """The markup around a message in a chat model's format, after the end of the policy's turn."""

    opening: str
    closing: str
    end: str
    """What ends a turn."""

    def around(self, text: str) -> str:
        return self.opening + text + self.closing


_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_SPACE = re.compile(r"\s*")
_DECODER = json.JSONDecoder()
CHATML = Markup(opening="\n<|im_start|>user\n", closing="<|im_end|>\n<|im_start|>assistant\n", end="<|im_end|>")
"""Qwen and its relatives."""


@dataclass(frozen=True, slots=True)
class Hermes:
    """`<tool_call>{"name": .., "arguments": {..}}</tool_call>`, as often as wanted, among other
    text. The texts of the JSON may have such tags in them.

    >>> Hermes().calls('So: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    [Call(tool='add', arguments={'a': 1}, as_text=False)]
    """

    markup: Markup = CHATML

    @property
    def end(self) -> str:
        return self.markup.end

    @property
    def text_end(self) -> str:
        return self.end

    def calls(self, text: str) -> list[Call | Malformed]:
        found: list[Call | Malformed] = []
        start = text.find(_OPENING)
        while start >= 0:
            body, place = _tagged(text, start + len(_OPENING))
            found.append(Malformed(f"{_OPENING} is not followed by {_CLOSING}") if body is None else _call(body))
            start = text.find(_OPENING, place)
        return found

    def observation(self, answers: Sequence[Answer]) -> str:
        told = [f"<tool_response>\n{answer.text}\n</tool_response>" for answer in answers]
        return self.markup.around("\n".join(told))

    def message(self, text: str) -> str:
        return self.markup.around(text)


@dataclass(frozen=True, slots=True)
class PlainJSON:
    """`{"name": .., "arguments": {..}}`, or a list of such, and nothing else; JSON that names no
    tool is a final answer.

    >>> PlainJSON().calls('{"name": "add"}'), PlainJSON().calls('{"sum": 3}')
    ([Call(tool='add', arguments={}, as_text=False)], [])
    """

    markup: Markup = CHATML

    @property
    def end(self) -> str:
        return self.markup.end

    @property
    def text_end(self) -> str:
        return self.end

    def calls(self, text: str) -> list[Call | Malformed]:
        bare = text.strip()
        if not bare.startswith(("{", "[")) or '"name"' not in bare:
            return []
        try:
            value: Any = msgspec.json.decode(_bytes(bare))
        except (*UNREADABLE, ValueError) as error:
            return [Malformed(f"this is not JSON: {error}")]
        parts: list[Any] = value if isinstance(value, list) else [value]
        if not all(isinstance(part, dict) and "name" in part for part in parts):
            return []
        return [_converted(part) for part in parts]

    def observation(self, answers: Sequence[Answer]) -> str:
        return self.markup.around("\n".join(answer.text for answer in answers))

    def message(self, text: str) -> str:
        return self.markup.around(text)


def _tagged(text: str, start: int) -> tuple[str | None, int]:
    """What is between a tag that ends at `start` and its closing tag, and the place after that;
    None: it has none before the next tag.
    """
    space = _SPACE.match(text, start)
    assert space is not None, "it matches anywhere"
    try:
        end = _DECODER.raw_decode(text, space.end())[1]
    except (ValueError, RecursionError):
        end = start
    again = text.find(_OPENING, end)
    closing = text.find(_CLOSING, end, again if again >= 0 else len(text))
    return (None, end) if closing < 0 else (text[start:closing], closing + len(_CLOSING))


class _Written(msgspec.Struct, frozen=True):
    """A call in JSON; further keys are ignored."""

    name: str
    arguments: dict[str, Any] = {}


def arguments_of(tool: str, text: str) -> Call | Malformed:
    """The call of a tool with the arguments in this text, a JSON object."""
    try:
        return Call(tool, msgspec.json.decode(_bytes(text), type=dict[str, Any]))
    except (*UNREADABLE, ValueError) as error:
        return Malformed(f"the arguments of {tool} are not a JSON object: {error}")


def _call(body: str) -> Call | Malformed:
    try:
        return _converted(msgspec.json.decode(_bytes(body)))
    except (*UNREADABLE, ValueError) as error:
        return Malformed(f"the call is not JSON: {error}")


def _converted(value: object) -> Call | Malformed:
    try:
        written = msgspec.convert(value, _Written)
    except msgspec.ValidationError as error:
        return Malformed(f'a call is {{"name": "<tool>", "arguments": {{..}}}}: {error}')
    return Call(written.name, written.arguments)


def _bytes(text: str) -> bytes:
    """Encode as UTF-8, replacing the halves of a surrogate pair that a tokenizer cut."""
    return text.encode("utf-8", "replace")
