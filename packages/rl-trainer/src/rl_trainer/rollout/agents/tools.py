"""The tool interface, and calling a tool so that a faulty one can't harm the run."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

import msgspec

from rl_protocol.errors import UNREADABLE
from rl_trainer.rollout.agents.dialects import Answer, Call, Malformed


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

    def call(self, arguments: Any) -> str:
        """Answer these arguments, of the type `arguments`. May raise any exception."""
        ...


def described(tool: Tool) -> dict[str, Any]:
    """The tool as chat templates expect it, in the form of OpenAI's functions."""
    (_,), components = msgspec.json.schema_components([tool.arguments], ref_template="#/$defs/{name}")
    schema = components.pop(tool.arguments.__name__)
    parameters = {**schema, "$defs": components} if components else schema
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": parameters},
    }


async def answer(call: Call | Malformed, tools: Mapping[str, Tool], timeout_s: float) -> Answer:
    """Make the call. An invalid call or a failing tool gives an error as answer."""
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
    try:
        async with asyncio.timeout(timeout_s):
            return await _in_thread(lambda: _made(tool, arguments))
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


def _made(tool: Tool, arguments: msgspec.Struct) -> Answer:
    try:
        text = cast(object, tool.call(arguments))  # tools may ignore their declared return type
    except Exception as error:  # noqa: BLE001 - user code: an exception is the answer to that call
        return _failed(f"{tool.name}: {type(error).__name__}: {error}")
    if not isinstance(text, str):
        return _failed(f"{tool.name} returned {type(text).__name__} in place of a text")
    return Answer(text)


def _failed(why: str) -> Answer:
    return Answer(f"error: {why}", failed=True)


async def _in_thread(work: Callable[[], Answer]) -> Answer:
    """The result of `work`, run in a daemon thread: one that hangs neither blocks others nor the
    exit.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Answer] = loop.create_future()

    def settle(result: Answer) -> None:
        if not done.done():
            done.set_result(result)

    def run() -> None:
        result = work()
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it the wait
            loop.call_soon_threadsafe(settle, result)

    threading.Thread(target=run, name="tool", daemon=True).start()
    return await done
