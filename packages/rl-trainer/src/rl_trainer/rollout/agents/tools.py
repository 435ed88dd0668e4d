"""The tool interface, and calling a tool so that a faulty one can't harm the run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import msgspec

from rl_protocol.errors import UNREADABLE
from rl_trainer.rollout.agents.dialects import Answer, Call, Malformed
from rl_trainer.rollout.agents.threads import in_thread


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
    def arguments(self) -> type[msgspec.Struct]:
        """Type of the arguments, which are checked against it. The policy sees its JSON schema."""
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


def described(tool: Tool) -> dict[str, Any]:
    """The tool as chat templates expect it, in the form of OpenAI's functions."""
    (_,), components = msgspec.json.schema_components([tool.arguments], ref_template="#/$defs/{name}")
    schema = components.pop(tool.arguments.__name__)
    parameters = {**schema, "$defs": components} if components else schema
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
    tool = tools.get(call.tool)
    if tool is None:
        return _failed(f"there is no tool {call.tool!r}; there are {', '.join(tools)}")
    try:
        given = _read(call.arguments, tool.arguments) if call.as_text else dict(call.arguments)
        arguments = msgspec.convert(given, tool.arguments)
    except msgspec.ValidationError as error:
        return _failed(f"{tool.name}: {error}")
    more = (row or {}).get(call.tool, {})
    try:
        async with asyncio.timeout(timeout_s):
            return await in_thread(lambda: _made(tool, arguments, more))
    except TimeoutError:
        return _failed(f"{tool.name} took longer than {timeout_s:g} s")


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


def _made(tool: Tool, arguments: msgspec.Struct, more: Mapping[str, Any]) -> Answer:
    try:
        text = cast(object, tool.call(arguments, **more))  # tools may ignore their declared return type
    except Exception as error:  # noqa: BLE001 - user code: an exception is the answer to that call
        return _failed(f"{tool.name}: {type(error).__name__}: {error}")
    if not isinstance(text, str):
        return _failed(f"{tool.name} returned {type(text).__name__} in place of a text")
    return Answer(text)


def _failed(why: str) -> Answer:
    return Answer(f"error: {why}", failed=True)
