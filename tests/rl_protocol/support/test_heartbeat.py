"""Heartbeats of real processes that run, stop, and hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl_protocol.support.heartbeat import Stillness, beat, read_beat
from rl_protocol.support.host.portable import uses_linux

PROGRAM = """
import ctypes, pathlib, sys
from rl_protocol.support.heartbeat import beat, beat_in_memory

if sys.argv[1]:
    beat(pathlib.Path(sys.argv[1]), 0.02)
else:
    print(beat_in_memory(0.02), flush=True)
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


@pytest.fixture
def in_memory():
    """A process that computes, and the path of its heartbeat in memory."""
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, "", "computes"], stdout=subprocess.PIPE, text=True)
    with process:
        yield process, Path(process.stdout.readline().strip())
        process.kill()


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


def test_a_heartbeat_in_memory_stands_still_and_ends_with_its_process(in_memory):
    process, path = in_memory
    assert counts(path, 2)[0] < read_beat(path)
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(0.2)
    still = counts(path, 3)
    assert None not in still
    assert len(set(still)) == 1
    process.kill()
    process.wait()
    if uses_linux():  # elsewhere its file stays until another process makes memory
        assert read_beat(path) is None


@pytest.mark.skipif(not uses_linux(), reason="the file of a process that was killed stays for a while")
def test_a_process_that_has_ended_and_was_not_waited_for_has_no_count(in_memory):
    process, path = in_memory
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert read_beat(path) is None


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
