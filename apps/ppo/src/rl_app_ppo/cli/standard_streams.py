"""Standard streams that are closed, full, or can't encode a character."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def forgiving_output() -> Generator[None]:
    """Print what can be printed, without a traceback for the rest.

    Characters that the terminal's encoding lacks are printed as `?`. A standard stream that the
    caller has closed (`>&-`) is opened as the null device, so that no other file gets its number.
    What can't be written at the end is discarded.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8"))
    streams = [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, io.TextIOWrapper)]
    for stream in streams:
        if stream.errors == "strict":
            stream.reconfigure(errors="replace")
    try:
        yield
    finally:
        for stream in streams:
            try:
                stream.flush()
            except OSError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
