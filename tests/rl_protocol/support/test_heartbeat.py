"""Heartbeats of real processes that run, stop, and hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from rl_protocol.support.heartbeat import Stillness, beat, read_beat

PROGRAM = """
import ctypes, pathlib, sys
from rl_protocol.support.heartbeat import beat

beat(pathlib.Path(sys.argv[1]), 0.02)
if sys.argv[2] == "computes":
    while True:
        pass
ctypes.PyDLL(None).sleep(100)  # a call of PyDLL keeps the GIL
"""


@pytest.fixture
def beating(tmp_path):
    """Start a process that computes or keeps the GIL; returns it and the file of its heartbeat."""
    started = []

    def start(what):
        file = tmp_path / what
        started.append(subprocess.Popen([sys.executable, "-c", PROGRAM, str(file), what]))
        deadline = time.monotonic() + 60
        while not read_beat(file):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return started[-1], file

    yield start
    for process in started:
        process.kill()
        process.wait()


def counts(file, looks=5):
    """The counts at looks that are half a second apart."""
    found = []
    for _ in range(looks):
        found.append(read_beat(file))
        time.sleep(0.5)
    return found


def test_a_process_that_computes_counts_and_a_stopped_one_does_not(beating):
    process, file = beating("computes")
    assert counts(file, 2)[0] < read_beat(file)
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(0.2)
    assert len(set(counts(file, 3))) == 1
    os.kill(process.pid, signal.SIGCONT)
    time.sleep(0.5)
    assert counts(file, 2)[0] < read_beat(file)


def test_a_process_that_keeps_the_gil_does_not_count(beating):
    _, file = beating("hangs")
    time.sleep(0.5)
    assert len(set(counts(file, 3))) == 1


def test_a_process_without_a_heartbeat_has_no_count(tmp_path):
    assert read_beat(tmp_path / "none") is None


def test_the_file_of_a_process_that_had_the_same_id_is_replaced(tmp_path):
    (tmp_path / "7.beat").write_bytes(bytes([200] * 8))
    beat(tmp_path / "7.beat", 100.0)
    assert (tmp_path / "7.beat").stat().st_size == 8
    assert read_beat(tmp_path / "7.beat") <= 1


def test_looks_are_counted_for_each_process():
    stillness = Stillness(3)
    looks = [(stillness.look("a", count), stillness.look("b", 1)) for count in (5, 5, 5, 6, 6, 6, 6)]
    assert [a for a, _ in looks] == [False] * 6 + [True]
    assert [b for _, b in looks] == [False] * 3 + [True] * 4
