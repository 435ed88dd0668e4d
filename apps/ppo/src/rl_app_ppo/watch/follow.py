"""`rl watch`: follows a run on the terminal, and serves its report on demand."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

from rl_app_ppo.watch.terminal import EVERY_S, watch


def follow(folder: Path, out: Console, port: int | None) -> bool:
    """Show a run until it is over, or until Ctrl-C; returns False if it did not finish.

    Args:
        folder: of the run.
        out: where to show it.
        port: serve the report there until Ctrl-C, 0: at a free port; None: don't serve it.

    Raises:
        ConfigError: it is no folder of a run, or can't be read.
        OutputError: the port is taken.
    """
    try:
        return watch(folder, out) if port is None else _served(folder, out, port)
    except KeyboardInterrupt:  # the user has seen enough; the run goes on
        return True


def _served(folder: Path, out: Console, port: int) -> bool:
    from rl_app_ppo.watch.server import ReportServer

    with ReportServer(folder, port) as server:
        out.print(Text(f"report: {server.url}"), soft_wrap=True)
        finished = watch(folder, out)
        out.print(Text("the report is served until Ctrl-C"), soft_wrap=True)
        try:
            while True:
                time.sleep(EVERY_S)
        except KeyboardInterrupt:
            return finished
