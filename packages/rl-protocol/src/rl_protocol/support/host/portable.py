"""Choose between Linux's own facilities and portable ones."""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path

VARIABLE = "RL_PORTABLE"
"""Environment variable; 1: use the portable facilities on Linux, too."""

SHARED_FOLDER = Path("/tmp")
"""Where the portable facilities keep files: the same for processes with different TMPDIR."""

SOCKET_PATH_LIMIT = 107 if sys.platform == "linux" else 103
"""Most bytes of the path of a Unix socket: those of `sun_path`, without the zero at its end."""


@cache
def uses_linux() -> bool:
    """Whether memfd, pidfd, epoll and /proc are used; a process decides once.

    All processes that share memory must give the same answer: set the variable for all of them.
    """
    return sys.platform == "linux" and os.environ.get(VARIABLE) != "1"
