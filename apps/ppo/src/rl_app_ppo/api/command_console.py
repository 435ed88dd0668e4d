"""Consoles whose output can fail: a pipe without a reader, or a file on a full disk."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Generator
from typing import Any, NoReturn

from rich.console import Console

from rl_protocol import OutputError

CLOSED = 128 + signal.SIGPIPE
"""Exit code of a command whose reader has ended, as a shell reports it for other tools."""


class CommandConsole(Console):
    """The console of a command that only prints; the command ends when it can't.

    Printing raises SystemExit with the code CLOSED where the reader has ended, as in
    `rl explain | head`, and OutputError where the output can't be written for another reason.
    """

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        with written_output():
            super().__exit__(exc_type, exc_value, traceback)

    def on_broken_pipe(self) -> NoReturn:
        """Let `written_output` handle the BrokenPipeError that rich handles now."""
        raise


class RunConsole(Console):
    """The console of a run, which continues without it: the rest is not printed.

    The first failure is a line of standard error. Threads may print: one at a time, from the moment
    it enters the console until what it printed is written. What rich draws below the lines is
    erased by its height on the terminal, so no other thread may write in between.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._turn = threading.RLock()

    def __enter__(self) -> Console:
        self._turn.acquire()
        return super().__enter__()

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        try:
            super().__exit__(exc_type, exc_value, traceback)
        except OSError as lost:
            self._lose(lost)
        finally:
            self._turn.release()

    def _lose(self, lost: OSError) -> None:
        if self.quiet:
            return
        self.quiet = True
        name = "standard error" if self.stderr else "standard output"
        with contextlib.suppress(OSError):  # standard error may have the same reader
            sys.stderr.write(
                f"{name} can't be written any more ({lost.strerror}): nothing more is printed, and the run continues. "
                "`rl watch` with its folder follows it; Ctrl-C ends it.\n"
            )
            sys.stderr.flush()

    def on_broken_pipe(self) -> NoReturn:
        """Let `__exit__` handle the BrokenPipeError that rich handles now."""
        raise


@contextlib.contextmanager
def written_output() -> Generator[None]:
    """End the command when what it prints within can't be written.

    Raises:
        SystemExit: the reader of the output has ended; with the code CLOSED.
        OutputError: it can't be written for another reason.
    """
    try:
        yield
    except BrokenPipeError:
        raise SystemExit(CLOSED) from None
    except OSError as error:
        raise OutputError(
            f"standard output can't be written: {error.strerror}. Free some space, or write to another file."
        ) from error
