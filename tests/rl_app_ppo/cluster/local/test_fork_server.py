"""The fork server ends with the run, whatever it is doing."""

from __future__ import annotations

import signal

from rl_app_ppo.cluster.local.fork_server import ForkServer

WAITS = "import os, select\nselect.select([0], [], [])\nos._exit(7)\n"
"""A module whose import lasts until the driver closes its end."""


def test_one_that_serves_no_worker_yet_is_ended_in_the_middle_of_its_imports(tmp_path, monkeypatch):
    (tmp_path / "waits.py").write_text(WAITS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    fork_server = ForkServer(["waits"])
    fork_server.close()
    fork_server.close()
    assert fork_server._process.returncode == -signal.SIGKILL
