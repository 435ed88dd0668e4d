"""The tool interface, and calling a tool so that a faulty one can't harm the run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import msgspec

from rl_protocol import ConfigError, RLError
from rl_protocol.errors import UNREADABLE, described_error, message_of
from rl_trainer.rollout.agents.dialects.base import Answer, Call, Malformed
from rl_trainer.rollout.agents.threads import in_thread

_DEEPEST = 4
"""Levels of a JSON schema that are searched for the types of an argument."""


class ToolError(RLError):
    """A call failed; the policy reads the message, which tells it what to do otherwise."""


class Tool(Protocol):
    """A tool that the policy can call.

    `call` runs in its own thread, concurrently with other calls of the tool. An exception or a
    timeout is reported to the policy as an error. A thread can't be stopped: one that never returns
    stays until its process ends, so a tool that waits needs its own timeout.
    """

    @property
    def name(self) -> str:
        """The name that the policy uses."""
        ...

    @property
    def description(self) -> str:
        """The description that the policy sees."""
        ...

    @property
    def arguments(self) -> type[msgspec.Struct] | Mapping[str, Any]:
        """Type of the arguments, which are checked against it. The policy sees its JSON schema.

        Or the JSON schema itself; the tool then gets a dict, and checks it.
        """
        ...

    @property
    def call(self) -> Callable[..., str]:
        """Answers arguments of the type `arguments`, given in the first place; by name it gets the
        row's execute_kwargs. May raise any exception.
        """
        ...


@dataclass(frozen=True)
class ToolKind:
    """A tool as packages register it: `TOOL = ToolKind(Calculator)`."""

    make: Callable[..., Tool]
    """Makes the tool of one session, from the row's create_kwargs. Without arguments it makes one
    that is only described.
    """
    ready: Callable[[], Awaitable[None]] | None = None
    """Waits until the tool can be called, before each session; None: it always can."""


def described(tool: Tool) -> dict[str, Any]:
    """The tool as chat templates expect it, in the form of OpenAI's functions."""
    if isinstance(tool.arguments, Mapping):
        return _function(tool, dict(tool.arguments))
    (_,), components = msgspec.json.schema_components([tool.arguments], ref_template="#/$defs/{name}")
    schema = components.pop(getattr(tool.arguments, "__name__", ""), None)
    if schema is None:
        raise ConfigError(
            f"The arguments of the tool {tool.name!r} must be a subclass of msgspec.Struct; got {tool.arguments!r}."
        )
    return _function(tool, {**schema, "$defs": components} if components else schema)


def _function(tool: Tool, parameters: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": parameters},
    }


async def answer(
    call: Call | Malformed,
    tools: Mapping[str, Tool],
    timeout_s: float,
    row: Mapping[str, Mapping[str, Any]] | None = None,
) -> Answer:
    """Make the call. An invalid call or a failing tool gives an error as answer.

    Args:
        call: what the policy wrote.
        tools: name -> tool of the session.
        timeout_s: longest duration of the call.
        row: name of a tool -> arguments that the row gives to each of its calls.
    """
    if isinstance(call, Malformed):
        return _failed(call.why)
    return replace(await _answer(call, tools, timeout_s, (row or {}).get(call.tool, {})), call_id=call.id)


async def _answer(call: Call, tools: Mapping[str, Tool], timeout_s: float, more: Mapping[str, Any]) -> Answer:
    tool = tools.get(call.tool)
    if tool is None:
        return _failed(f"there is no tool {call.tool!r}; there are {', '.join(tools)}")
    try:
        async with asyncio.timeout(timeout_s):
            return await in_thread(lambda: _made(tool, call, more))
    except TimeoutError:
        return _failed(f"{tool.name} took longer than {timeout_s:g} s")


def _arguments(call: Call, wanted: type[msgspec.Struct] | Mapping[str, Any]) -> msgspec.Struct | dict[str, Any]:
    """The arguments as the tool gets them.

    Raises:
        ToolError: they are not of its type.
    """
    if isinstance(wanted, Mapping):
        return _read_by_schema(call.arguments, wanted) if call.as_text else dict(call.arguments)
    given = _read(call.arguments, wanted) if call.as_text else dict(call.arguments)
    try:
        return msgspec.convert(given, wanted)
    except msgspec.ValidationError as error:
        raise ToolError(str(error)) from error


def _read_by_schema(texts: Mapping[str, str], schema: Mapping[str, Any]) -> dict[str, Any]:
    """The values of these texts: as they are where the schema allows a text, else as JSON."""
    values: dict[str, Any] = dict(texts)
    for name, text in texts.items():
        if not _takes_text(_part(schema, "properties", name), schema):
            with contextlib.suppress(*UNREADABLE, ValueError):
                values[name] = msgspec.json.decode(text.encode("utf-8", "replace"))
    return values


def _takes_text(part: object, whole: Mapping[str, Any], depth: int = 0) -> bool:
    """Whether this part of a JSON schema allows a text, as far as it tells."""
    if not isinstance(part, Mapping) or depth == _DEEPEST:
        return True
    schema = cast(Mapping[str, Any], part)
    if "$ref" in schema:
        return _takes_text(_part(whole, *str(schema["$ref"]).removeprefix("#/").split("/")), whole, depth + 1)
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return any(_takes_text(one, whole, depth + 1) for one in options)
    if parts := schema.get("allOf"):
        return all(_takes_text(one, whole, depth + 1) for one in parts)
    if "const" in schema or "enum" in schema:
        return any(isinstance(value, str) for value in schema.get("enum", [schema.get("const")]))
    kinds = schema.get("type", "string")
    return "string" in ([kinds] if isinstance(kinds, str) else kinds)


def _part(schema: object, *names: str) -> object:
    """What a JSON schema has under these names; None: nothing."""
    for name in names:
        schema = cast(Mapping[str, Any], schema).get(name) if isinstance(schema, Mapping) else None
    return schema


def _read(texts: Mapping[str, str], arguments: type[msgspec.Struct]) -> dict[str, Any]:
    """The values of these texts: as they are where the argument may be a text, else as JSON.

    What is not JSON stays a text, which checking then refuses.
    """
    types = {field.encode_name: field.type for field in msgspec.structs.fields(arguments)}
    values: dict[str, Any] = dict(texts)
    for name, text in texts.items():
        try:
            msgspec.convert(text, types.get(name, Any))
        except msgspec.ValidationError:
            with contextlib.suppress(*UNREADABLE, ValueError):
                values[name] = msgspec.json.decode(text.encode("utf-8", "replace"))
    return values


def _made(tool: Tool, call: Call, more: Mapping[str, Any]) -> Answer:
    try:
        arguments = _arguments(call, tool.arguments)  # may run code of the tool's type
        text = cast(object, tool.call(arguments, **more))  # tools may ignore their declared return type
    except ToolError as error:
        return _failed(f"{tool.name}: {message_of(error)}")
    except BaseException as error:  # noqa: BLE001 - user code: an exception is the answer to that call
        return _failed(f"{tool.name}: {described_error(error)}")
    if not isinstance(text, str):
        return _failed(f"{tool.name} returned {type(text).__name__} in place of a text")
    return Answer(text)


def _failed(why: str) -> Answer:
    return Answer(f"error: {why}", failed=True)
