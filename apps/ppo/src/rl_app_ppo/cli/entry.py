"""The entry points: `rl`, and `uv run apps/ppo`. Imports nothing before Ctrl-C is handled."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress


def rl() -> None:
    """Run the command `rl`."""
    with _interrupts_end_the_process():
        from rl_app_ppo.cli.rl import main as run
    with _forgiving_output():
        run()


def main() -> None:
    """Run the command line of `uv run apps/ppo`."""
    with _interrupts_end_the_process():
        from rl_app_ppo.cli.main import main as run
    with _forgiving_output():
        sys.exit(run())


@contextmanager
def _interrupts_end_the_process() -> Generator[None]:
    """Ctrl-C ends the process at once and without a traceback, as long as it only imports."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    yield
    signal.signal(signal.SIGINT, handler)


def _end(number: int, frame: object) -> None:
    """Die of the signal, which a shell reports as 130; imports may catch what a handler raises."""
    del frame
    with suppress(OSError):
        os.write(2, b"interrupted\n")
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


@contextmanager
def _forgiving_output() -> Generator[None]:
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
