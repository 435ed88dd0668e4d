"""A point kills the process that is armed for it, once, and no other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rl_protocol.support.fault_points import FaultPoint, armed_for

PROGRAM = """
from rl_protocol.support.fault_points import FaultPoint, reach
for _ in range(3):
    reach(FaultPoint.JOURNAL_APPENDED)
    print("appended", flush=True)
    reach(FaultPoint.JOURNAL_COMMITTED)
"""


def run(environment: dict[str, str]) -> tuple[int, int]:
    """Return the exit status and how often the program got past its first point."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**os.environ, **environment}, capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout.count("appended")


def test_nothing_happens_in_a_process_that_is_not_armed() -> None:
    assert run({}) == (0, 3)


@pytest.mark.parametrize(
    ("point", "passes", "wanted"),
    [
        (FaultPoint.JOURNAL_APPENDED, 2, (-signal.SIGKILL, 1)),
        (FaultPoint.JOURNAL_COMMITTED, 1, (-signal.SIGKILL, 1)),
        (FaultPoint.JOURNAL_COMMITTED, 4, (0, 3)),
        (FaultPoint.SESSIONS_SETTLED, 1, (0, 3)),
    ],
)
def test_an_armed_process_is_killed_at_that_pass(
    tmp_path: Path, point: FaultPoint, passes: int, wanted: tuple[int, int]
) -> None:
    file = tmp_path / "reached"
    assert run(armed_for(point, passes, file)) == wanted
    assert file.exists() == (wanted[0] != 0)
    assert run(armed_for(point, passes, file)) == (0, 3)  # only the first process that reaches it
