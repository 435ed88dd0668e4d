"""The connection between two hosts of a run is cut while the processes of both run."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from app_runs import MARK, processes_of, started
from cut_connections import cut_all
from two_namespaces import HEAD, OTHER, PORT, ip, namespaces, node, nodes_start, private_cluster, two_nodes_in
from two_nodes import two_nodes

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]
RANKS = (
    *("trainer.nnodes=2", "trainer.threads_per_worker=1", "model_engine=fsdp", "fsdp.world_size=2", "fsdp.device=cpu"),
    *("placement=actor+ref", "rollout.num_workers=2", "actor.use_kl_loss=true", "trainer.val_before_train=false"),
    *("data.val_size=16", "data.train_batch_size=8", "actor.ppo_mini_batch_size=8", "trainer.test_freq=0"),
    *("checkpoint_engine.backend=tcp", "trainer.save_freq=1"),
)


def steps(folder: Path) -> list[int]:
    metrics = folder / "metrics.jsonl"
    return [json.loads(line)["step"] for line in metrics.read_text().splitlines()] if metrics.exists() else []


def test_a_dead_rank_and_a_cut_connection_between_ranks_are_named_and_survived(tmp_path, base_model, mark, monkeypatch):
    """The second rank is killed, and then the connections between both ranks, which run on."""
    monkeypatch.setenv("RL_HOST", "a")
    folder, total = tmp_path / "run", 16
    more = (
        f"model.path={base_model}",
        f"trainer.total_training_steps={total}",
        "transfer_queue.listen=127.0.0.1",
        "restart.backoff_s=0.1",
    )
    with two_nodes("a", "b", num_cpus=2) as address:
        run = started(mark, folder, *RANKS, *more, f"ray.address={address}", lines=2)
        try:
            (victim,) = processes_of(folder, "actor_ref-1")
            os.kill(victim, signal.SIGKILL)
            assert cut_all(*newcomers(folder, victim)) > 0
            out, err = run.communicate(timeout=400)
        finally:
            run.kill()
            run.communicate()
    assert run.returncode == 0, (out, err)
    died, cut = (line for line in out.splitlines() if "so the run starts again" in line)
    assert re.search(r"a process of the run has died.*restart 1 of .*Worker actor(_ref)?-1 ", died), died
    named = rf"restart 2 of .*Worker actor_ref(-1)? on {re.escape(socket.gethostname())} has lost its connection"
    assert re.search(f"ranks of a model have lost their connection.*{named}", cut), cut
    assert out.count("resumes after step") == 2
    assert steps(folder) == list(range(1, total + 1))


def newcomers(folder: Path, victim: int) -> tuple[int, int]:
    """Both ranks of the attempt after that of the victim, once it has trained a step."""
    before, deadline = len(steps(folder)), time.monotonic() + 200
    while True:
        ranks = [processes_of(folder, name)[-1] for name in ("actor_ref", "actor_ref-1")]
        if ranks[1] != victim and len(steps(folder)) > before:
            return ranks[0], ranks[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_run_whose_hosts_lose_each_other_ends_and_names_the_lost_one(cut_run):
    """The cable between two network namespaces is pulled: no process learns of it from a socket."""
    with cut_run("trainer.total_training_steps=1000", "restart.max_per_hour=0") as cut:
        _, err = cut.run.communicate(timeout=200)
    assert cut.run.returncode == 1, err
    assert re.search(
        rf"Worker [\w-]+ on \S+ \(node {re.escape(OTHER)}\) died during [\w.]+: .*node was terminated", err
    ), err


def test_a_run_continues_on_a_new_host_once_one_has_lost_the_network(cut_run):
    """The cable is pulled; then the node in the second network namespace is replaced.

    The processes of the lost host run on, and are there when its network comes back.
    """
    total = 12
    with cut_run(f"trainer.total_training_steps={total}", "restart.backoff_s=0.1") as cut:
        printed = list[str]()
        for line in cut.run.stdout:
            printed.append(line)
            if "for a node to join" in line:
                break
        ip("-n", cut.first, "link", "set", "cable", "up")
        words = (f"--node-ip-address={OTHER}", f"--address={HEAD}:{PORT}")
        with node(cut.second, {**cut.environment, "RL_HOST": "b"}, *words):
            out, err = cut.run.communicate(timeout=400)
    assert cut.run.returncode == 0, (printed, out, err)
    before = "".join(printed)
    assert f"(node {OTHER}) died during" in before
    assert "resumes after step" in before
    assert "the run waits up to 400 s (ray.start_timeout_s) for a node to join" in before
    assert steps(cut.folder) == list(range(1, total + 1))


@dataclass(frozen=True)
class CutRun:
    """A run over two network namespaces, whose cable was pulled after two steps."""

    run: subprocess.Popen[str]
    folder: Path
    first: str
    second: str
    environment: dict[str, str]


@pytest.fixture
def cut_run(tmp_path, base_model, mark, monkeypatch):
    """make(*settings) -> context of a CutRun with these settings, killed at the end."""
    private_cluster(monkeypatch, tmp_path)
    # Ray gives a node up after 4 checks of 2 s without an answer
    monkeypatch.setenv("RAY_health_check_period_ms", "500")
    monkeypatch.setenv("RAY_health_check_timeout_ms", "2000")
    monkeypatch.setenv("RAY_health_check_failure_threshold", "4")
    environment, folder = {**os.environ, MARK: mark}, tmp_path / "run"
    common = (
        *RANKS,
        *(f"model.path={base_model}", f"trainer.output_dir={tmp_path}", "trainer.run_name=run"),
        *(f"ray.address={HEAD}:{PORT}", f"transfer_queue.listen={HEAD}", "ray.start_timeout_s=400"),
    )

    @contextmanager
    def make(*settings):
        app = [sys.executable, str(Path(__file__).parents[3] / "apps" / "ppo"), *common, *settings]
        with namespaces() as (first, second), two_nodes_in(first, second, environment):
            run, deadline = start_in(first, app, environment), time.monotonic() + 300
            try:
                while len(steps(folder)) < 2:
                    assert time.monotonic() < deadline
                    if run.poll() is not None:
                        assert nodes_start(run.communicate()[1])
                        run = start_in(first, app, environment)
                    time.sleep(0.1)
                ip("-n", first, "link", "set", "cable", "down")
                yield CutRun(run, folder, first, second, environment)
            finally:
                run.kill()
                run.communicate()

    return make


def start_in(namespace: str, words: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    """A process in a network namespace."""
    return subprocess.Popen(
        ["ip", "netns", "exec", namespace, *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
