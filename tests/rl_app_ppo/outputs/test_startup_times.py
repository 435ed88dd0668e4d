"""The start-up report names the current phase, even while the phase blocks."""

from __future__ import annotations

import threading

from rl_app_ppo.outputs.startup_times import Startup


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
