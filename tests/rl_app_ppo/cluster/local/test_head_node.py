"""The head node of a run has the servers that the run uses, and forks its workers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SESSION = """
import asyncio, json, os, signal, sys, time
from contextlib import closing
from pathlib import Path
from rl_app_ppo.cluster.environment import environment, ray_settings
from rl_app_ppo.cluster.local.fork_server import ForkServer

said = []  # not printed, since Ray prints, too

def say(*words):
    said.append(" ".join(map(str, words)))

def children():
    found = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text().rpartition(")")[2].split()
            command = (file.parent / "cmdline").read_bytes().decode().split("\\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == os.getpid() and fields[0] != "Z":
            found[int(file.parent.name)] = Path(command[0]).name
    return found

def servers():
    return sorted(name for name in children().values() if name[:6] != "python")

def servers_once(wanted):  # a process that starts or ends is seen for a moment
    deadline = time.monotonic() + 60
    while (found := servers()) != wanted and time.monotonic() < deadline:
        time.sleep(0.02)
    return found

async def session(fork_server):
    from rl_app_ppo.cluster.ray_session import ray_session
    from rl_app_ppo.config.loading import load_config
    config = load_config([])
    async with ray_session(config.ray, config.trainer, fork_server):
        import ray

        class Worker:
            def facts(self):
                return os.getppid(), os.nice(0), "decimal" in sys.modules, os.environ.get("SET_LATER"), os.getpid()

        worker_class = ray.remote(num_cpus=0)(Worker)
        first = worker_class.remote()
        parent, *facts, pid = ray.get(first.facts.remote())
        say(facts == [os.nice(0), True, "yes"], servers_once(["gcs_server", "raylet"]))
        say(parent == fork_server.pid)
        os.kill(pid, signal.SIGKILL)
        try:
            ray.get(first.facts.remote())
        except ray.exceptions.RayActorError:
            say("it died")
        second = worker_class.remote()
        say(ray.get(second.facts.remote())[0] == parent)
    return ray.is_initialized()

with environment(ray_settings(local=True)), closing(ForkServer({})) as fork_server:
    fork_server.prepare(MODULES)
    os.environ["SET_LATER"] = "yes"
    say(asyncio.run(session(fork_server)))
say(children())
Path(sys.argv[1]).write_text(json.dumps(said))
"""


def run(folder: Path, modules: list[str]) -> list[str]:
    code, said = SESSION.replace("MODULES", repr(modules)), folder / "said.json"
    command = [sys.executable, "-c", code, str(said)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(said.read_text())


@pytest.mark.slow
def test_a_session_has_two_servers_and_forks_its_workers_also_after_one_died(tmp_path):
    assert run(tmp_path, ["decimal"]) == ["True ['gcs_server', 'raylet']", "True", "it died", "True", "False", "{}"]


@pytest.mark.slow
def test_workers_start_by_themselves_if_a_module_can_not_be_imported(tmp_path):
    assert run(tmp_path, ["decimal", "no_such_module"])[1:] == ["False", "it died", "True", "False", "{}"]
