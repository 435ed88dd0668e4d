"""Program of a process that runs one reward function; its arguments are NAME TIMEOUT_S MEMORY_MB.

Stdin is a socket for calls and answers: msgpack messages, each preceded by its length (4 bytes,
little-endian). The first message says whether the function could be loaded. Output of the function
goes to stderr. The process ends when the parent does.
"""

from __future__ import annotations

import os
import resource
import signal
import struct
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

import msgspec

from rl_protocol import ConfigError
from rl_protocol.support.host.this_process import end_with_parent, limit_memory
from rl_protocol.support.stack_dumps import dump_at_signal
from rl_trainer.rewards.functions import Form, form_of, place_of, run
from rl_trainer.rewards.loading import load_reward
from rl_trainer.rewards.scorer import Outcome, Sample

LENGTH = struct.Struct("<I")


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """First message: form and place of the function, or why it could not be loaded."""

    form: Form = "single"
    where: str = ""
    error: str = ""


def main() -> None:
    """Serve until the socket closes."""
    name, timeout_s, memory_mb = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    end_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit_memory(memory_mb << 20)
    dump_at_signal()
    connection = os.dup(0)  # a descriptor that programs started by the function do not inherit
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    with os.fdopen(connection, "rb") as calls, os.fdopen(os.dup(connection), "wb") as answers:
        try:
            function = load_reward(name)
            hello = Hello(form=form_of(function), where=place_of(function))
        except ConfigError as error:
            _write(answers, Hello(error=str(error)))
            return
        _write(answers, hello)
        _serve(function, timeout_s, calls, answers)


def _serve(function: Callable[..., Any], timeout_s: float, calls: BinaryIO, answers: BinaryIO) -> None:
    pid = os.getpid()
    while head := calls.read(LENGTH.size):
        samples = msgspec.msgpack.decode(calls.read(LENGTH.unpack(head)[0]), type=list[Sample])
        outcomes = run(function, samples, timeout_s)
        if os.getpid() != pid:  # a fork made by the function must neither answer nor clean up
            os.kill(os.getpid(), signal.SIGKILL)
        _write(answers, outcomes)


def _write(answers: BinaryIO, message: Hello | list[Outcome]) -> None:
    payload = msgspec.msgpack.encode(message)
    answers.write(LENGTH.pack(len(payload)) + payload)
    answers.flush()
