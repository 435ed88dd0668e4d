"""The head node of a run has the servers that the run uses, and no others."""

from __future__ import annotations

import subprocess
import sys

import pytest

SESSION = """
import asyncio, os
from pathlib import Path
from rl_app_ppo.cluster.environment import environment, ray_settings

def children():
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, fields = file.read_text().rsplit(")", 1)
            command = (file.parent / "cmdline").read_bytes().decode().split("\\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields.split()[1]) == os.getpid():
            found.append(" ".join(Path(word).name for word in command[:3]))
    return found

async def session():
    from rl_app_ppo.cluster.ray_session import ray_session
    from rl_app_ppo.config.loading import load_config
    config = load_config([])
    async with ray_session(config.ray, config.trainer):
        import ray
        assert ray.get(ray.remote(lambda: os.nice(0)).remote()) == os.nice(0)
        print(sorted(child.split()[0] for child in children()))
    print(children(), ray.is_initialized())

with environment(ray_settings(local=True)):
    asyncio.run(session())
"""


@pytest.mark.slow
def test_a_session_starts_gcs_server_and_raylet_alone_and_workers_of_its_own_niceness():
    done = subprocess.run([sys.executable, "-c", SESSION], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["['gcs_server', 'raylet']", "[] False"]
