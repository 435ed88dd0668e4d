"""If a run fails because a process is gone, the error names the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from rl_app_ppo.cluster.lost_processes import fate, named_losses
from rl_protocol import ConfigError, PlaneTimeout, WorkerDiedError


@pytest.fixture
def child():
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read(); sys.exit(3)"], stdin=subprocess.PIPE
    )
    yield process
    process.kill()
    process.communicate()


def until(pid, what):
    deadline = time.monotonic() + 60
    while what not in fate(pid):
        assert time.monotonic() < deadline, fate(pid)
        time.sleep(0.01)


def failed(child, what):
    until(child.pid, what)
    error, first = PlaneTimeout("no answer within 60 s."), PlaneTimeout("no answer, either.")
    first.add_note("stage gen")
    error.add_note("step 3")
    error.__context__ = first  # the cleanup failed too
    named = rf"The controller \(process {child.pid}\) {what}.* during stage gen, step 3\. Because of that: no answer"
    with (
        pytest.raises(WorkerDiedError, match=named),
        named_losses({child.pid: "The controller", os.getpid(): "This one"}),
    ):
        raise error


def test_a_killed_process_is_named(child):
    child.send_signal(signal.SIGKILL)
    failed(child, "was killed by SIGKILL")
    assert child.wait(60) == -signal.SIGKILL  # the parent can still reap it
    assert fate(child.pid) == "is gone"


def test_a_stopped_process_is_named(child):
    child.send_signal(signal.SIGSTOP)
    failed(child, "is stopped")
    child.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + 60
    while fate(child.pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_one_that_ended_is_named_with_its_code(child):
    child.stdin.close()
    child.stdin = None
    failed(child, "ended with code 3")


def test_other_errors_stay_what_they_are(child):
    with pytest.raises(PlaneTimeout, match=r"^slow$"), named_losses({child.pid: "The controller"}):
        raise PlaneTimeout("slow")
    child.kill()
    until(child.pid, "killed")
    with pytest.raises(ConfigError, match=r"^a setting$"), named_losses({child.pid: "The controller"}):
        raise ConfigError("a setting")
