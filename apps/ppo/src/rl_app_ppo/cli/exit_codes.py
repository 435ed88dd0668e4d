"""Exit codes of the command line, and how errors are printed.

0 success; 1 the run failed, or a conversion loses settings; 2 the command line, the configuration
or the output folder is wrong; 130 interrupted; 141 the reader of what a command prints has ended.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

from rich.console import Console
from rich.text import Text

from rl_app_ppo.cli.entry import SIGNALS, end
from rl_protocol import ConfigError, OutputError, RLError

SAME_S = 1.0
"""A Ctrl-C that comes so soon after another is the same one."""
INTERRUPTED = 130


def exit_code(work: Callable[[], int], err: Console) -> int:
    """The exit code that the work returns, or that of its error, which is printed."""
    with _interrupts_counted_once():
        try:
            return work()
        except RLError as error:
            wrong_input = isinstance(error, ConfigError | OutputError)
            err.print(Text(f"{'error' if wrong_input else 'the run failed'}: {error}"), soft_wrap=True)
            return 2 if wrong_input else 1
        except KeyboardInterrupt:
            err.print(Text("interrupted; everything written so far is kept"))
            return INTERRUPTED


@contextmanager
def _interrupts_counted_once() -> Generator[None]:
    """Raise KeyboardInterrupt for Ctrl-C, SIGTERM and SIGHUP, and once for two within SAME_S.

    A terminal sends them to `uv run` and to this process, and `uv run` forwards them; the second
    one would interrupt the clean-up after the first. SIGTERM and SIGHUP are left alone in a process
    that is not the command line's.
    """
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    ours = {number: handler for number, handler in handlers.items() if handler in (end, signal.default_int_handler)}
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    last = -SAME_S

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= SAME_S:
            last = now
            signal.default_int_handler(number, frame)

    for number in ours:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)
