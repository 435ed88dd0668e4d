"""The entry points: `rl`, and `uv run apps/ppo`. Imports nothing before signals are handled."""

from __future__ import annotations

import os

TYPE_CHECKING = False  # see the package
if TYPE_CHECKING:
    import signal
else:
    import _signal as signal  # built in; `signal` imports other modules for longer than Python starts

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What interrupts a command."""


def rl() -> None:
    """Run the command `rl`."""
    end_at_signals()
    from rl_app_ppo.cli.rl import main as run
    from rl_app_ppo.cli.standard_streams import forgiving_output

    with forgiving_output():
        run()


def main() -> None:
    """Run the command line of `uv run apps/ppo`."""
    end_at_signals()
    from rl_app_ppo.cli.main import main as run
    from rl_app_ppo.cli.standard_streams import forgiving_output

    with forgiving_output():
        raise SystemExit(run())


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
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
