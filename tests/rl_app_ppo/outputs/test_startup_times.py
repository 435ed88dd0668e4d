"""The start-up report names the current phase, even while the phase blocks."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time

from rl_app_ppo.outputs.startup_times import Startup
from rl_protocol.support.host.portable import uses_linux


def test_a_start_says_which_phase_is_under_way_also_while_it_blocks():
    said, enough = [], threading.Event()

    def say(line):
        said.append(line)
        if len(said) >= 2:
            enough.set()

    startup = Startup(say, every_s=0.01)
    with startup.phase("models", "workers load their models"):
        assert enough.wait(60)
    startup.end()
    count = len(said)
    assert all(line.startswith("  workers load their models (") for line in said)
    assert not startup._thread.is_alive()
    startup.end()
    assert len(said) == count
    assert startup.metrics().keys() == {"startup_s/models", "startup_s/total"}


def test_the_first_training_step_says_how_long_after_the_command_it_ended():
    startup = Startup(lambda _: None, before_s=100.0)
    with startup.phase("ray", "starting Ray"), startup.phase("data_plane", "starting the data plane"):
        pass
    startup.done()
    startup.end()
    metrics = startup.metrics()
    assert metrics.keys() == {"startup_s/process", "startup_s/ray", "startup_s/data_plane", "startup_s/total"}
    assert metrics["startup_s/process"] == 100.0
    first, line = startup.first_step()
    assert 100.0 < metrics["startup_s/total"] <= first["startup_s/first_step"]
    assert re.fullmatch(r"start: first step done after [\d.]+ s \(process 100.0, data_plane 0.0, ray 0.0\)", line)


def test_the_age_of_a_command_is_that_of_its_process():
    code = "import time; from rl_app_ppo.outputs.startup_times import command_age; print(command_age())"
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    unit_s = 0.01 if uses_linux() else 1.0
    assert 0 <= float(done.stdout) < time.monotonic() - began + 2 * unit_s


def test_the_newest_phase_is_said_while_phases_overlap():
    said, enough = [], threading.Event()

    def say(line):
        said.append(line)
        enough.set()

    startup = Startup(say, every_s=0.01)
    with startup.phase("ray", "starting Ray"):
        with startup.phase("data_plane", "starting the data plane"):
            assert enough.wait(60)
        first = said[0]
        said.clear()
        enough.clear()
        assert enough.wait(60)
    startup.end()
    assert first.startswith("  starting the data plane (")
    assert said[-1].startswith("  starting Ray (")
