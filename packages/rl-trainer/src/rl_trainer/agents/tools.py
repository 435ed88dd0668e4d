"""Tools: what they are to the loop, and how one is called so that nothing it does harms the run."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

import msgspec

from rl_trainer.agents.calls import Answer, Call, Malformed


class Tool(Protocol):
    """Something the policy can call.

    `call` runs in a thread of its own, beside others of the same tool. Whatever it raises is told to the policy, as is that it was late; a
    thread can't be stopped, so one that never returns stays until its process ends: give what waits a deadline of its own.
    """

    @property
    def name(self) -> str:
        """What the policy calls it by."""
        ...

    @property
    def description(self) -> str:
        """What the policy is told of it."""
        ...

    @property
    def arguments(self) -> type[msgspec.Struct]:
        """What it takes. Arguments are checked against it; its JSON schema is what the policy is told."""
        ...

    def call(self, arguments: Any) -> str:
        """The answer to arguments of the type `arguments`. It may raise anything."""
        ...


def described(tool: Tool) -> dict[str, Any]:
    """The tool as chat templates want it, in the form of OpenAI's functions."""
    (_,), components = msgspec.json.schema_components([tool.arguments], ref_template="#/$defs/{name}")
    schema = components.pop(tool.arguments.__name__)
    parameters = {**schema, "$defs": components} if components else schema
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": parameters},
    }


async def answer(call: Call | Malformed, tools: Mapping[str, Tool], timeout_s: float) -> Answer:
    """Make the call; what is wrong with it, or with the tool, is an answer that says so."""
    if isinstance(call, Malformed):
        return _failed(call.why)
    tool = tools.get(call.tool)
    if tool is None:
        return _failed(f"there is no tool {call.tool!r}; there are {', '.join(tools)}")
    try:
        arguments = msgspec.convert(dict(call.arguments), tool.arguments)
    except msgspec.ValidationError as error:
        return _failed(f"{tool.name}: {error}")
    try:
        async with asyncio.timeout(timeout_s):
            return await _in_thread(lambda: _made(tool, arguments))
    except TimeoutError:
        return _failed(f"{tool.name} took longer than {timeout_s:g} s")


def _made(tool: Tool, arguments: msgspec.Struct) -> Answer:
    try:
        text = cast(object, tool.call(arguments))  # of others, who may not have checked their types
    except Exception as error:  # noqa: BLE001 - the boundary to code of others: whatever it raises is the answer to that call
        return _failed(f"{tool.name}: {type(error).__name__}: {error}")
    if not isinstance(text, str):
        return _failed(f"{tool.name} returned {type(text).__name__} in place of a text")
    return Answer(text)


def _failed(why: str) -> Answer:
    return Answer(f"error: {why}", failed=True)


async def _in_thread(work: Callable[[], Answer]) -> Answer:
    """What `work` returns. Its thread is a daemon: one that hangs keeps neither others waiting nor the process from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Answer] = loop.create_future()

    def settle(result: Answer) -> None:
        if not done.done():
            done.set_result(result)

    def run() -> None:
        result = work()
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
            loop.call_soon_threadsafe(settle, result)

    threading.Thread(target=run, name="tool", daemon=True).start()
    return await done
