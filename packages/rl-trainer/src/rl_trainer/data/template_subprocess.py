"""Renders chat templates in a child process with limited time and memory.

A chat template is a program that comes with a model. jinja2's sandbox protects the objects of this
process, but does not stop nested loops or strings of any length.

This file is also the child's program, run by its path without importing the rest of this package.
Stdin and stdout carry msgpack messages, each preceded by its length (4 bytes, little-endian). The
child first reads the template and answers None or an error. Then it reads lists of conversations,
and answers each conversation with its text or an error; an answer is flushed within 0.05 s or with
the next one.
"""

from __future__ import annotations

import json
import os
import resource
import select
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import IO, Any, BinaryIO, NoReturn

import msgspec
from jinja2 import Template, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Name, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rl_protocol.errors import UNREADABLE
from rl_protocol.support.host.this_process import end_with_parent, limit_memory

START_S = 60.0
"""Time limit for the child to start and to compile the template."""
RENDER_S = 10.0
"""Time limit for one conversation."""
MEMORY_MB = 512
"""Memory limit, in addition to what Python and jinja2 use."""
MOST_CHARACTERS = 2**26
"""Limit for the text of one prompt."""
_LENGTH = struct.Struct("<I")
_BUFFER_BYTES = 1 << 16
_FLUSH_S = 0.05


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The template raised an error for a conversation, or does not compile."""

    reason: str


class Exhausted(msgspec.Struct, frozen=True, tag=True):
    """The template exceeded its limit of memory or text."""

    reason: str


class RunawayTemplateError(Exception):
    """The template exceeded a limit or ended its process."""


_Answer = str | Refused | Exhausted | None
_answers = msgspec.msgpack.Decoder(_Answer)


class Renderer:
    """A template in a child process, which starts on first use and ends with this object.

    Args:
        template: source of the template.
        values: variables of the template besides those of each conversation.
    """

    def __init__(self, template: str, values: Mapping[str, object]) -> None:
        self._hello = msgspec.msgpack.encode((template, dict(values)))
        self._child: _Child | None = None
        self._lock = threading.Lock()
        self._end = weakref.finalize(self, lambda: None)

    def render(self, conversations: Sequence[Mapping[str, object]]) -> list[str | Refused]:
        """The text of each conversation, given as variables of the template, or why the template
        rejects it.

        Raises:
            RunawayTemplateError: the template exceeded a limit. The message says which.
        """
        with self._lock:
            try:
                child = self._started()
                child.send(msgspec.msgpack.encode(conversations))
                return [_text(child.answer(RENDER_S)) for _ in conversations]
            except BaseException as error:  # later answers of the child would be for this call
                self._end()
                self._child = None
                if isinstance(error, BrokenPipeError):
                    raise RunawayTemplateError("it ended its process") from error
                raise

    def _started(self) -> _Child:
        if self._child is None:
            self._child = _Child()
            self._end = weakref.finalize(self, _kill, self._child.process)
            self._child.send(self._hello)
            answer = self._child.answer(START_S)
            if isinstance(answer, Refused):
                raise RunawayTemplateError(f"it can't be compiled: {answer.reason}")
        return self._child


def template_names(template: str) -> frozenset[str]:
    """Parse a template without running any of it, and return the names of its variables.

    Raises:
        ValueError: it does not parse.
    """
    try:
        return frozenset(name.name for name in _environment().parse(template).find_all(Name))
    except (TemplateError, RecursionError) as error:
        raise ValueError(str(error)) from error


def _text(answer: _Answer) -> str | Refused:
    if isinstance(answer, str | Refused):
        return answer
    raise RunawayTemplateError(answer.reason if answer else "its process gave no answer")


class _Child:
    """The process, and the output of it that is not consumed yet."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self.process.stdout is not None
        self._fd = self.process.stdout.fileno()
        self._output = bytearray()

    def send(self, payload: bytes) -> None:
        assert self.process.stdin is not None
        _write(self.process.stdin, payload)
        self.process.stdin.flush()

    def answer(self, timeout_s: float) -> _Answer:
        """The next answer.

        Raises:
            RunawayTemplateError: it is late or invalid.
        """
        deadline = time.monotonic() + timeout_s
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size, deadline, timeout_s))
        if length > 4 * MOST_CHARACTERS + 64:
            raise RunawayTemplateError(f"its process answered with {length} bytes")
        try:
            return _answers.decode(self._take(length, deadline, timeout_s))
        except UNREADABLE as error:
            raise RunawayTemplateError(f"its process gave an unreadable answer: {error}") from error

    def _take(self, count: int, deadline: float, timeout_s: float) -> bytes:
        while len(self._output) < count:
            ready, _, _ = select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RunawayTemplateError(f"it took more than {timeout_s:g} s")
            more = os.read(self._fd, _BUFFER_BYTES)
            if not more:
                raise RunawayTemplateError("it ended its process")
            self._output += more
        taken = bytes(self._output[:count])
        del self._output[:count]
        return taken


def _kill(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    for pipe in (child.stdin, child.stdout):
        assert pipe is not None
        try:
            pipe.close()
        except BrokenPipeError:  # unsent data is not needed any more
            continue
    child.wait()


# -- runs in the child
def main() -> None:
    """Render until stdin ends."""
    end_with_parent()
    calls, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb", buffering=_BUFFER_BYTES)
    os.dup2(2, 1)  # only answers go to the former stdout
    template, values = msgspec.msgpack.decode(_message(calls))
    limit_memory(MEMORY_MB << 20, further=True)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        compiled = _environment().from_string(template)
    except Exception as error:  # noqa: BLE001 - from constants of the template
        _write(answers, msgspec.msgpack.encode(Refused(f"{type(error).__name__}: {error}")))
        answers.flush()
        return
    _write(answers, msgspec.msgpack.encode(None))
    answers.flush()
    while call := _message(calls):
        flushed = time.monotonic()
        for conversation in msgspec.msgpack.decode(call):
            _write(answers, msgspec.msgpack.encode(_rendered(compiled, {**values, **conversation})))
            if time.monotonic() - flushed > _FLUSH_S:  # the parent limits the time between answers
                answers.flush()
                flushed = time.monotonic()
        answers.flush()


def _rendered(template: Template, values: Mapping[str, Any]) -> _Answer:
    try:
        text = template.render(values)
    except MemoryError:
        return Exhausted(f"it took more than {MEMORY_MB} MiB of memory")
    except TemplateError as error:
        return Refused(str(error))
    except Exception as error:  # noqa: BLE001 - boundary to the template, which may raise anything
        return Refused(f"{type(error).__name__}: {error}")
    if len(text) > MOST_CHARACTERS:
        return Exhausted(f"it wrote {len(text)} characters for one prompt")
    return text


def _message(calls: BinaryIO) -> bytes:
    head = calls.read(_LENGTH.size)
    return calls.read(_LENGTH.unpack(head)[0]) if len(head) == _LENGTH.size else b""


def _write(pipe: IO[bytes], payload: bytes) -> None:
    pipe.write(_LENGTH.pack(len(payload)) + payload)


class _Generation(Extension):
    """`{% generation %}..{% endgeneration %}`, which marks what the assistant wrote, for others."""

    tags = {"generation"}  # noqa: RUF012 - as in its base class

    def parse(self, parser: Parser) -> Scope:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return Scope(body, lineno=line)


def _environment() -> Any:
    """The environment that transformers uses: sandboxed, blocks trimmed."""
    environment: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


if __name__ == "__main__":
    main()
