"""Llama's dialects: `llama3_json`, and `pythonic` of Llama 3.2 and 4."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from rl_trainer.rollout.agents.dialects.base import Answer, Call, Malformed

_TAGS = ("<|python_tag|>", "<|python_start|>", "<|python_end|>")
_END = "<|eot_id|>"
_CALLS = re.compile(r"\[\s*[A-Za-z_][\w.]*\(")
_NAMES = {"true": True, "false": False, "null": None}


def llama_observation(answers: Sequence[Answer]) -> str:
    """Each answer as a message of the role ipython, as JSON, as Llama's chat templates write it."""
    told = [_message("ipython", json.dumps(answer.text, ensure_ascii=False)) for answer in answers]
    return "".join(told) + _head("assistant")


def llama_message(text: str) -> str:
    """A message of the role user."""
    return _message("user", text) + _head("assistant")


def _message(role: str, text: str) -> str:
    return f"{_head(role)}{text}{_END}"


def _head(role: str) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n"


@dataclass(frozen=True, slots=True)
class Llama3JSON:
    """`{"name": .., "parameters": {..}}`, several separated by `;`, and nothing else. `arguments`
    is accepted for `parameters`; JSON that names no tool is a final answer.

    >>> Llama3JSON().calls('{"name": "add", "parameters": {"a": 1}}')
    [Call(tool='add', arguments={'a': 1}, as_text=False)]
    """

    @property
    def end(self) -> str:
        return _END

    @property
    def text_end(self) -> str:
        return self.end

    def calls(self, text: str) -> list[Call | Malformed]:
        body = text.strip().removeprefix(_TAGS[0]).strip()
        if not body.startswith("{") or '"name"' not in body:
            return []
        found: list[Call | Malformed] = []
        place = 0
        while place < len(body):
            try:
                value, place = _DECODER.raw_decode(body, place)
            except (ValueError, RecursionError) as error:
                return [*found, Malformed(f"this is not JSON: {error}")]
            if not (isinstance(value, dict) and "name" in value):
                return [*found, Malformed('a call is {"name": "<tool>", "parameters": {..}}')] if found else []
            found.append(_converted(cast(dict[str, Any], value)))
            place += len(body[place:]) - len(body[place:].lstrip("; \n\t\r"))
        return found

    def observation(self, answers: Sequence[Answer]) -> str:
        return llama_observation(answers)

    def message(self, text: str) -> str:
        return llama_message(text)


@dataclass(frozen=True, slots=True)
class Pythonic:
    """`[add(a=1, b="x"), now()]` and nothing else: a Python list of calls with keyword arguments of
    literals. It is parsed, never executed.

    >>> Pythonic().calls('[add(a=1, b=["x"]), now()]')  # doctest: +NORMALIZE_WHITESPACE
    [Call(tool='add', arguments={'a': 1, 'b': ['x']}, as_text=False),
     Call(tool='now', arguments={}, as_text=False)]
    """

    @property
    def end(self) -> str:
        return _END

    @property
    def text_end(self) -> str:
        return self.end

    def calls(self, text: str) -> list[Call | Malformed]:
        bare = text
        for tag in _TAGS:
            bare = bare.replace(tag, "")
        bare = bare.strip()
        if _CALLS.match(bare) is None:
            return []
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of an escape such as \d in a text
                tree = ast.parse(bare, mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return [Malformed(f"this is no list of calls in Python: {error}")]
        if not isinstance(tree, ast.List):
            return [Malformed("the turn must be a list of calls in Python, and nothing else")]
        return [_from_python(node) for node in tree.elts]

    def observation(self, answers: Sequence[Answer]) -> str:
        return llama_observation(answers)

    def message(self, text: str) -> str:
        return llama_message(text)


_DECODER = json.JSONDecoder()


class _Written(msgspec.Struct, frozen=True):
    """A call in JSON; further keys are ignored."""

    name: str
    parameters: dict[str, Any] | None = None
    arguments: dict[str, Any] | None = None


def _converted(value: dict[str, Any]) -> Call | Malformed:
    try:
        written = msgspec.convert(value, _Written)
    except msgspec.ValidationError as error:
        return Malformed(f'a call is {{"name": "<tool>", "parameters": {{..}}}}: {error}')
    return Call(written.name, written.parameters or written.arguments or {})


def _from_python(node: ast.expr) -> Call | Malformed:
    if not isinstance(node, ast.Call) or not (name := _dotted(node.func)):
        return Malformed("an element of the list is no call, such as tool(key=1)")
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        return Malformed("arguments must have names, such as tool(key=1)")
    try:
        return Call(name, {str(keyword.arg): _literal(keyword.value) for keyword in node.keywords})
    except (ValueError, RecursionError) as error:
        return Malformed(f"{name}: {error}")


def _dotted(node: ast.expr) -> str:
    """A name such as `files.read`; empty: it is none."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _literal(node: ast.expr) -> Any:
    """The value of a literal; also JSON's true, false and null.

    Raises:
        ValueError: it is no literal.
    """
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [_literal(part) for part in parts]
        case ast.Dict(keys=keys, values=values) if all(isinstance(key, ast.Constant) for key in keys):
            return {_literal(cast(ast.expr, key)): _literal(value) for key, value in zip(keys, values, strict=True)}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case _:
            raise ValueError("the value of an argument must be a literal")
