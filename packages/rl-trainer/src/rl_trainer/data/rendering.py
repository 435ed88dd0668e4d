"""Chat templates are programs that come with a model. They run in a child process, whose time and memory are limited.

jinja2's sandbox keeps them from this process's objects, not from loops within loops and strings of any length.

This file is also the child's program, run by its path with nothing else of this package. Stdin and stdout carry msgpack messages, each after its
length (4 bytes, little-endian): the template comes in and None or an error goes out; then lists of conversations come in, and for each
conversation its text or an error goes out, within 0.05 s or with the next one.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import IO, Any, BinaryIO, NoReturn

import msgspec
from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

START_S = 60.0
"""Longest a child may take to start and to read the template."""
RENDER_S = 10.0
"""Longest it may take for one conversation."""
MEMORY_MB = 512
"""What it may take beside what Python and jinja2 take."""
MOST_CHARACTERS = 2**26
"""No prompt is longer."""
_LENGTH = struct.Struct("<I")
_BUFFER_BYTES = 1 << 16
_FLUSH_S = 0.05
_PR_SET_PDEATHSIG = 1


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The template raised an error for a conversation, or can't be compiled."""

    reason: str


class Exhausted(msgspec.Struct, frozen=True, tag=True):
    """The template took more memory or wrote more than it may."""

    reason: str


class RunawayTemplateError(Exception):
    """A template that does not end, takes all memory or spoils its process."""


_Answer = str | Refused | Exhausted | None
_answers = msgspec.msgpack.Decoder(_Answer)


class Renderer:
    """A template in a child process, which starts when it is needed first and ends with this object.

    Args:
        template: source of the template.
        values: what it is given beside messages.
    """

    def __init__(self, template: str, values: Mapping[str, object]) -> None:
        self._hello = msgspec.msgpack.encode((template, dict(values)))
        self._child: _Child | None = None
        self._lock = threading.Lock()
        self._end = weakref.finalize(self, lambda: None)

    def render(self, conversations: Sequence[object]) -> list[str | Refused]:
        """The text of each conversation, or why the template refuses it.

        Raises:
            RunawayTemplateError: a limit was reached; says which.
        """
        with self._lock:
            try:
                child = self._started()
                child.send(msgspec.msgpack.encode(conversations))
                return [_text(child.answer(RENDER_S)) for _ in conversations]
            except BaseException as error:  # what the child says next belongs to no question
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


def check_syntax(template: str) -> None:
    """Read a template without running any of it; constants are computed when it is compiled, which the child does.

    Raises:
        ValueError: it is no template.
    """
    try:
        _environment().parse(template)
    except (TemplateError, RecursionError) as error:
        raise ValueError(str(error)) from error


def _text(answer: _Answer) -> str | Refused:
    if isinstance(answer, str | Refused):
        return answer
    raise RunawayTemplateError(answer.reason if answer else "its process gave no answer")


class _Child:
    """The process, and what it has said that was not asked for yet."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self.process.stdout is not None
        self._fd = self.process.stdout.fileno()
        self._said = bytearray()

    def send(self, payload: bytes) -> None:
        assert self.process.stdin is not None
        _write(self.process.stdin, payload)
        self.process.stdin.flush()

    def answer(self, timeout_s: float) -> _Answer:
        """The next one.

        Raises:
            RunawayTemplateError: it does not come in time, or is none.
        """
        deadline = time.monotonic() + timeout_s
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size, deadline, timeout_s))
        if length > 4 * MOST_CHARACTERS + 64:
            raise RunawayTemplateError(f"its process answered with {length} bytes")
        try:
            return _answers.decode(self._take(length, deadline, timeout_s))
        except msgspec.DecodeError as error:
            raise RunawayTemplateError(f"its process gave no answer that can be read: {error}") from error

    def _take(self, count: int, deadline: float, timeout_s: float) -> bytes:
        while len(self._said) < count:
            ready, _, _ = select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RunawayTemplateError(f"it took more than {timeout_s:g} s")
            more = os.read(self._fd, _BUFFER_BYTES)
            if not more:
                raise RunawayTemplateError("it ended its process")
            self._said += more
        taken = bytes(self._said[:count])
        del self._said[:count]
        return taken


def _kill(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    for pipe in (child.stdin, child.stdout):
        assert pipe is not None
        try:
            pipe.close()
        except BrokenPipeError:  # what was not sent is of no use any more
            continue
    child.wait()


# -- in the child
def main() -> None:
    """Render until stdin ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    calls, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb", buffering=_BUFFER_BYTES)
    os.dup2(2, 1)  # nothing but answers goes there
    template, values = msgspec.msgpack.decode(_message(calls))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (MEMORY_MB << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        compiled = _environment().from_string(template)
    except Exception as error:  # noqa: BLE001 - the boundary: constants of the template are computed here, with whatever error
        _write(answers, msgspec.msgpack.encode(Refused(f"{type(error).__name__}: {error}")))
        answers.flush()
        return
    _write(answers, msgspec.msgpack.encode(None))
    answers.flush()
    while call := _message(calls):
        flushed = time.monotonic()
        for messages in msgspec.msgpack.decode(call):
            _write(answers, msgspec.msgpack.encode(_rendered(compiled, messages, values)))
            if time.monotonic() - flushed > _FLUSH_S:  # the other side counts the time from answer to answer
                answers.flush()
                flushed = time.monotonic()
        answers.flush()


def _rendered(template: Template, messages: object, values: Mapping[str, Any]) -> _Answer:
    try:
        text = template.render(messages=messages, **values)
    except MemoryError:
        return Exhausted(f"it took more than {MEMORY_MB} MiB of memory")
    except TemplateError as error:
        return Refused(str(error))
    except Exception as error:  # noqa: BLE001 - the boundary: a template may raise what any Python may
        return Refused(f"{type(error).__name__}: {error}")
    if len(text) > MOST_CHARACTERS:
        return Exhausted(f"it wrote {len(text)} characters for one prompt")
    return text


def _message(calls: BinaryIO) -> bytes:
    head = calls.read(_LENGTH.size)
    return calls.read(_LENGTH.unpack(head)[0]) if len(head) == _LENGTH.size else b""


def _write(pipe: IO[bytes], payload: bytes) -> None:
    pipe.write(_LENGTH.pack(len(payload)) + payload)


def _environment() -> Any:
    """As transformers makes it: sandboxed, blocks trimmed."""
    environment: Any = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    return environment


def _to_json(value: object, indent: int | None = None, ensure_ascii: bool = False) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


if __name__ == "__main__":
    main()
