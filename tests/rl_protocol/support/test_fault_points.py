"""A point kills the process that is armed for it, once, and no other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
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


FLIPPED = """
from rl_protocol.support.fault_points import FaultPoint, reach
for _ in range(3):
    weights = bytearray(4)
    reach(FaultPoint.WEIGHTS_SENT, memoryview(weights))
    print(sum(map(bool, weights)), flush=True)
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


def test_a_slow_process_sleeps_at_that_pass_and_all_later_ones(tmp_path: Path) -> None:
    file = tmp_path / "reached"
    began = time.monotonic()
    assert run(armed_for(FaultPoint.JOURNAL_APPENDED, 2, file, seconds=0.3)) == (0, 3)
    assert time.monotonic() - began >= 0.6
    assert file.exists()
    file.unlink()
    assert run(armed_for(FaultPoint.JOURNAL_APPENDED, 4, file, seconds=0.3)) == (0, 3)
    assert not file.exists()


def test_one_byte_changes_at_that_pass_once_in_all_processes(tmp_path: Path) -> None:
    def flipped() -> list[str]:
        armed = armed_for(FaultPoint.WEIGHTS_SENT, 2, tmp_path / "reached", flips=True)
        command = [sys.executable, "-c", FLIPPED]
        return subprocess.check_output(command, env={**os.environ, **armed}, text=True, timeout=60).split()

    assert flipped() == ["0", "1", "0"]
    assert (tmp_path / "reached").exists()
    assert flipped() == ["0", "0", "0"]


def test_the_clock_of_leases_jumps_at_that_reading_and_stays_ahead(tmp_path: Path) -> None:
    program = """
from rl_protocol.support.fault_points import lease_clock
first, *later = [lease_clock() for _ in range(4)]
print(*[int(now - first) // 1000 for now in later])
"""
    armed = armed_for(FaultPoint.LEASE_CLOCK_READ, 3, tmp_path / "reached", seconds=5000.0)
    command = [sys.executable, "-c", program]
    assert subprocess.check_output(command, env={**os.environ, **armed}, text=True, timeout=60).split() == [
        "0",
        "5",
        "5",
    ]
    assert (tmp_path / "reached").exists()
