"""Python stacks that a process writes at a signal, without its event loop or its GIL."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO

DUMP = signal.SIGUSR2
"""At this signal a process of a run appends the stacks of its threads to its log."""
STACK_LOG = "RL_STACK_LOG"
"""Environment variable: the log of the process that started this one."""


def dump_at_signal(log: TextIO | None = None) -> None:
    """Have this process append the stacks of all threads to an open file at the signal DUMP.

    Args:
        log: stays open as long as the process runs; None: the file that STACK_LOG names, or stderr.
    """
    faulthandler.register(DUMP, file=log or _inherited(), all_threads=True)


def _inherited() -> TextIO:
    if path := os.environ.get(STACK_LOG):
        with suppress(OSError):  # it was removed
            return Path(path).open("a", encoding="utf-8")
    return sys.__stderr__ or sys.stderr
