"""A run over two hosts with a slow link between them learns what one host does; what it costs.

The hosts are network namespaces, whose link carries each packet 20 ms after it was sent. All that
passes between the hosts is delayed: Ray, the ranks' gloo, rows, and weights.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from two_namespaces import HEAD, OTHER, PORT, namespaces, private_cluster, run_in, two_nodes_in

ROOT = Path(__file__).parents[3]
LAST_RUN = Path(__file__).with_name("delayed_link_last_run.json")
"""Seconds per step of the nightly test, by layout and delay."""
DELAYS_S = (0.0, 0.02)
STEPS, WARM_UP = 8, 2
DEMO = (
    *("trainer.deterministic=true", "trainer.threads_per_worker=1", "trainer.val_before_train=false"),
    *("trainer.test_freq=0", f"trainer.total_training_steps={STEPS}", "actor.optim.lr=1e-3", "data.val_size=32"),
    *("data.train_batch_size=8", "actor.ppo_mini_batch_size=8", "rollout.num_workers=2", "ray.start_timeout_s=400"),
)
LAYOUTS = {
    "a rank and a replica on each host": (
        *("model_engine=fsdp", "fsdp.world_size=2", "fsdp.device=cpu", "placement=actor+ref"),
        "actor.use_kl_loss=true",
    ),
    "the second host only generates": ("placement=[actor+reward]", "actor.use_kl_loss=false"),
}
SERVER = """
import socket, sys
listener = socket.create_server((sys.argv[1], 0))
print(listener.getsockname()[1], flush=True)
connection, _ = listener.accept()
while received := connection.recv(1 << 16):
    connection.sendall(received)
"""
CLIENT = """
import os, socket, sys, threading, time
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])), 60)
began = time.monotonic()
connection.sendall(b"x")
assert connection.recv(1) == b"x"
print(time.monotonic() - began)
sent = os.urandom(4 << 20)
threading.Thread(target=connection.sendall, args=(sent,)).start()
received = bytearray()
while len(received) < len(sent):
    received += connection.recv(1 << 16)
print(received == sent)
"""


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_each_direction_of_the_link_takes_the_delay_and_loses_nothing():
    delay_s = 0.05
    with namespaces(delay_s) as (first, second):
        python = [sys.executable, "-c"]
        server = subprocess.Popen(
            ["ip", "netns", "exec", second, *python, SERVER, OTHER], stdout=subprocess.PIPE, text=True
        )
        with server:
            assert server.stdout is not None
            port = server.stdout.readline().strip()
            client = ["ip", "netns", "exec", first, *python, CLIENT, OTHER, port]
            done = subprocess.run(client, check=True, stdout=subprocess.PIPE, text=True, timeout=120)
    seconds, whole = done.stdout.split()
    assert float(seconds) >= 2 * delay_s
    assert whole == "True"


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_delay_of_20_ms_changes_no_parameter(app, base_model, tmp_path, monkeypatch, layout):
    settings = (*DEMO, *LAYOUTS[layout])
    alone = app(*settings, "trainer.run_name=one")
    assert alone.code == 0, alone.err
    wanted, before = learned(tmp_path / "one"), load_file(base_model / "model.safetensors")
    assert any((value != before[name]).any() for name, value in wanted.items())
    private_cluster(monkeypatch, tmp_path)
    found = dict[str, dict[str, float]]()
    for delay_s in DELAYS_S:
        folder = tmp_path / f"delay-{delay_s}"
        over_link(folder, delay_s, *settings, f"model.path={base_model}")
        weights = learned(folder)
        assert weights.keys() == wanted.keys()
        for name, value in wanted.items():
            np.testing.assert_array_equal(weights[name], value, err_msg=name)
        found[f"{1000 * delay_s:g}"] = per_step(folder)
    keep(layout, found)


def over_link(folder: Path, delay_s: float, *settings: str) -> None:
    """Run the app in two network namespaces whose link has this delay."""
    more = (
        *("trainer.nnodes=2", f"trainer.output_dir={folder.parent}", f"trainer.run_name={folder.name}"),
        *(f"ray.address={HEAD}:{PORT}", f"transfer_queue.listen={HEAD}", "checkpoint_engine.backend=tcp"),
    )
    with namespaces(delay_s) as (first, second), two_nodes_in(first, second, dict(os.environ)):
        done = run_in(first, [sys.executable, str(ROOT / "apps" / "ppo"), *settings, *more])
    assert done.returncode == 0, done.stderr
    assert f"node {OTHER}: " in done.stdout


def learned(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "checkpoint" / "model.safetensors")


def per_step(folder: Path) -> dict[str, float]:
    """Medians of the steps after the first ones: seconds by stage, bytes between the hosts."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "actor/pg_loss" in line][WARM_UP:]
    assert len(steps) == STEPS - WARM_UP
    names = [name for name in steps[0] if name.startswith("timing_s/")]
    names += ["transfer_queue/bytes_network", "weight_sync/bytes"]
    return {name: round(statistics.median(step[name] for step in steps), 4) for name in names}


@functools.cache
def commit() -> str:
    """The commit of the working tree, before the first write of LAST_RUN changes it."""
    described = ["git", "describe", "--always", "--dirty", "--abbrev=8", "--exclude=*"]
    return subprocess.run(described, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def keep(layout: str, found: dict[str, dict[str, float]]) -> None:
    """Write the figures of a layout into LAST_RUN."""
    last: dict[str, Any] = json.loads(LAST_RUN.read_text()) if LAST_RUN.exists() else {}
    last[layout] = {
        "commit": commit(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "load_average": round(os.getloadavg()[0], 1),
        "steps": STEPS - WARM_UP,
        "by delay in each direction, ms": found,
    }
    LAST_RUN.write_text(json.dumps(last, indent=2) + "\n")
