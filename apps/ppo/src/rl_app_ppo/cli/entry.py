"""The entry points: `rl`, and `uv run apps/ppo`. Imports nothing before signals are handled."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # see the package
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable
    from contextlib import AbstractContextManager
else:
    import _signal as signal  # built in; `signal` imports other modules for longer than Python starts

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What interrupts a command."""
_WITH_A_RUN = ("--config", "--trust", "--allow-unsafe-plugins")
"""Flags of commands that train."""
_at_end: list[Callable[[], None]] = []
"""What `end` calls first."""


def rl() -> None:
    """Run the command `rl`."""
    end_at_signals()
    words = sys.argv[1:]
    with _workers_imports(begin=words[:1] in (["train"], ["demo"]) and _runs(words[1:])):
        from rl_app_ppo.cli.rl import main as run
        from rl_app_ppo.cli.standard_streams import forgiving_output

        with forgiving_output():
            run()


def main() -> None:
    """Run the command line of `uv run apps/ppo`."""
    end_at_signals()
    with _workers_imports(begin=_runs(sys.argv[1:])):
        from rl_app_ppo.cli.main import main as run
        from rl_app_ppo.cli.standard_streams import forgiving_output

        with forgiving_output():
            raise SystemExit(run())


def _runs(words: list[str]) -> bool:
    """Whether no flag asks for something else than a run."""
    return all(word in _WITH_A_RUN or not word.startswith("-") for word in words)


def _workers_imports(*, begin: bool) -> AbstractContextManager[None]:
    """Import in another process what workers need, while this one imports the command, which it
    does without garbage collection: `launch` begins it when the start is over.
    """
    if not begin:
        from contextlib import nullcontext

        return nullcontext()
    import gc

    from rl_app_ppo.cluster.environment import compute_settings, ray_settings
    from rl_app_ppo.cluster.local.fork_server import close_early, started_early

    gc.disable()
    _at_end.append(close_early)
    return started_early(ray_settings(local=True) | compute_settings(0))


def end_at_signals() -> None:
    """Have Ctrl-C, SIGTERM and SIGHUP end the process at once and without a traceback.

    They do so while it imports, and at its end; `exit_code` handles them during a command.
    """
    for number in SIGNALS:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):  # else a caller's, or ignored
            signal.signal(number, end)


def end(number: int, frame: object) -> None:
    """Die of the signal, which a shell reports as 130; imports may catch what a handler raises."""
    del frame
    try:  # noqa: SIM105 - contextlib may be half imported
        os.write(2, b"interrupted\n")
    except OSError:
        pass
    for call in _at_end:
        call()
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
