"""The panel of `rl watch` in the terminal of the run itself, below the lines of its steps."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from rl_app_ppo.outputs.console import Screen
from rl_app_ppo.watch.followed_run import FollowedRun
from rl_app_ppo.watch.overview import overview
from rl_app_ppo.watch.terminal import EVERY_S, panel
from rl_protocol import ConfigError

logger = logging.getLogger(__name__)
_PAUSE = 20.0
"""The panel waits this many times as long as it computed, so that a long run pays at most 5 %."""


@contextmanager
def live_panel(folder: Path, screen: Screen) -> Generator[None]:
    """Draw once a second, from a thread, what the run has recorded; nothing without a terminal."""
    if screen.size is None:
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_draw, args=(FollowedRun(folder), screen, ended), name="live-panel", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _draw(run: FollowedRun, screen: Screen, ended: threading.Event) -> None:
    spent = 0.0
    while not ended.wait(max(EVERY_S, _PAUSE * spent)) and (size := screen.size) is not None:
        began = time.perf_counter()
        try:
            screen.panel(panel(overview(run.read(time.time()), time.time()), *size))
        except ConfigError as error:
            screen.panel(None)
            logger.warning("the panel stops: %s", error)
            return
        spent = time.perf_counter() - began
    screen.panel(None)
