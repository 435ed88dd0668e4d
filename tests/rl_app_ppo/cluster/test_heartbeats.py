"""Counts of real processes, and the end of those that are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rl_app_ppo.cluster.heartbeats import HostBeats

PROGRAM = """
import time
from rl_protocol.support.heartbeat import beat_in_memory
print(beat_in_memory(0.02), flush=True)
time.sleep(100)
"""


@pytest.fixture
def process():
    """A process, and the file of its heartbeat."""
    started = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    with started:
        yield started, Path(started.stdout.readline().strip())
        started.kill()


def test_a_process_that_runs_is_counted_and_killed_once(process, tmp_path):
    started, file = process
    beats = HostBeats()
    (tmp_path / "7").write_bytes((200).to_bytes(8, "little"))
    found = beats.counts({started.pid: file, started.pid + (1 << 23): tmp_path / "7"})  # above all process ids
    assert list(found) == [started.pid]
    started.send_signal(signal.SIGSTOP)
    assert beats.counts({started.pid: file})[started.pid] >= found[started.pid]
    assert beats.kill(started.pid)
    os.waitid(os.P_PID, started.pid, os.WEXITED | os.WNOWAIT)
    assert not beats.kill(started.pid)
    assert beats.counts({started.pid: file}) == {}
    assert started.wait(60) == -signal.SIGKILL


def test_a_process_without_a_heartbeat_has_no_count(process, tmp_path):
    started, _ = process
    assert HostBeats().counts({started.pid: tmp_path / "none"}) == {}


def test_another_process_with_the_id_of_one_that_has_ended_is_not_killed(process, monkeypatch):
    """It has another start."""
    started, file = process
    beats = HostBeats()
    with monkeypatch.context() as patch:
        patch.setattr(psutil.Process, "_get_ident", lambda self: (self.pid, 0.0))
        beats.counts({started.pid: file})
    assert beats.counts({started.pid: file}) == {}
    assert not beats.kill(started.pid)
    assert started.poll() is None
