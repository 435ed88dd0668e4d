"""The fork server ends with the run, whatever it is doing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import closing, suppress

import pytest

from rl_app_ppo.cluster.local import fork_client
from rl_app_ppo.cluster.local import fork_server as module
from rl_app_ppo.cluster.local.fork_server import ForkServer, fork_server, started_early
from rl_app_ppo.cluster.lost_processes import fate
from rl_app_ppo.watchdog.stacks import descendants
from rl_protocol.support.host.portable import uses_linux

WAITS = "import os, select\nselect.select([0], [], [])\nos._exit(7)\n"
"""A module whose import lasts until the driver closes its end."""
NAMED = "open('/proc/self/comm', 'w').write('raylet')\n"


def test_one_that_serves_no_worker_yet_is_ended_in_the_middle_of_its_imports(tmp_path, monkeypatch):
    (tmp_path / "waits.py").write_text(WAITS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    fork_server = ForkServer({}, ["waits"])
    fork_server.close()
    fork_server.close()
    assert fork_server._process.returncode == -signal.SIGKILL


def test_a_run_uses_the_one_that_started_with_the_command_if_it_has_its_settings(monkeypatch):
    monkeypatch.setattr(module, "_OF_ALL_RUNS", ("decimal",))
    with started_early({"OMP_NUM_THREADS": "1"}):
        (early,) = module._early
        with closing(fork_server({"OMP_NUM_THREADS": "1"}, ["fractions"])) as first:
            assert first is early
            with closing(fork_server({"OMP_NUM_THREADS": "1"}, [])) as second:  # of the next attempt
                assert second.pid != first.pid
    with started_early({"OMP_NUM_THREADS": "1"}):
        (early,) = module._early
        with closing(fork_server({"OMP_NUM_THREADS": "2"}, [])) as other:
            assert other is not early
            assert early._process.returncode == -signal.SIGKILL
            assert other.settings == {"OMP_NUM_THREADS": "2"}


def test_one_that_no_run_uses_ends_with_the_command(monkeypatch):
    monkeypatch.setattr(module, "_OF_ALL_RUNS", ("decimal",))
    with started_early({}):
        (early,) = module._early
    assert early._process.returncode == -signal.SIGKILL


def test_a_worker_that_is_still_starting_ends_with_it(tmp_path):
    """Regression: it made the folder of the run's Ray again after the run had removed it."""
    starting = tmp_path / "starting"
    worker = tmp_path / "worker.py"
    worker.write_text(f"import pathlib, time\npathlib.Path({str(starting)!r}).mkdir()\ntime.sleep(600)\n")
    requests = tmp_path / "fork"
    fork_server = ForkServer({})
    fork_server.prepare([])
    fork_server.listen(requests)
    subprocess.run([sys.executable, "-I", "-S", fork_client.__file__, str(requests), str(worker)], check=True)
    deadline = time.monotonic() + 60
    while not starting.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (pid,) = descendants(fork_server.pid)
    fork_server.close()
    while not fate(pid):
        assert time.monotonic() < deadline, "the worker runs"
        time.sleep(0.01)


@pytest.mark.skipif(not uses_linux(), reason="only Linux kills a process with its parent")
def test_a_worker_that_was_not_forked_ends_with_its_raylet(tmp_path):
    """Regression: it lived for half a minute after a driver that was killed."""
    started, worker, raylet = tmp_path / "pid", tmp_path / "worker.py", tmp_path / "raylet.py"
    worker.write_text(
        "import os, pathlib, sys, time\n"
        "pathlib.Path(sys.argv[1]).with_suffix('.new').write_text(str(os.getpid()))\n"
        "os.replace(pathlib.Path(sys.argv[1]).with_suffix('.new'), sys.argv[1])\n"
        "time.sleep(600)\n"
    )
    client = [sys.executable, "-I", "-S", fork_client.__file__, str(tmp_path / "fork"), str(worker), str(started)]
    raylet.write_text(f"{NAMED}import subprocess\nsubprocess.run({client!r})\n")
    deadline = time.monotonic() + 20
    with subprocess.Popen([sys.executable, str(raylet)]) as parent:
        while not started.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        parent.kill()
    pid = int(started.read_text())
    try:
        while not fate(pid):
            assert time.monotonic() < deadline, "the worker runs"
            time.sleep(0.01)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.skipif(not uses_linux(), reason="only Linux kills a process with its parent")
def test_a_worker_whose_raylet_has_ended_does_not_start(tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text("raise SystemExit(7)\n")
    client = [sys.executable, "-I", "-S", fork_client.__file__, str(tmp_path / "fork"), str(worker)]
    assert subprocess.run(client, check=False).returncode == 1
    named = f"{NAMED}import subprocess, sys\nsys.exit(subprocess.run({client!r}).returncode)\n"
    assert subprocess.run([sys.executable, "-c", named], check=False).returncode == 7
