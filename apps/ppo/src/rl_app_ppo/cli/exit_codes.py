"""Exit codes of the command line, and how errors are printed.

0 success; 1 the run failed, or a conversion loses settings; 2 the command line, the configuration
or the output folder is wrong; 130 interrupted.
"""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.text import Text

from rl_protocol import ConfigError, OutputError, RLError


def exit_code(work: Callable[[], int], err: Console) -> int:
    """The exit code that the work returns, or that of its error, which is printed."""
    try:
        return work()
    except RLError as error:
        wrong_input = isinstance(error, ConfigError | OutputError)
        err.print(Text(f"{'error' if wrong_input else 'the run failed'}: {error}"), soft_wrap=True)
        return 2 if wrong_input else 1
    except KeyboardInterrupt:
        err.print(Text("interrupted; everything written so far is kept"))
        return 130
