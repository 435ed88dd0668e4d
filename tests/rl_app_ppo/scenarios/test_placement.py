"""Whole runs with roles in one process and in a process each, without Ray.

The worker processes are objects of this process.
"""

from __future__ import annotations

import contextlib
import gc
import json
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from process_settings import settings_kept
from safetensors.numpy import load_file

import rl_transferqueue
from rl_app_ppo.cli.main import main
from rl_app_ppo.cluster.ray_actor import RayProcess
from rl_app_ppo.driver import processes, workers
from rl_app_ppo.worker import build
from rl_app_ppo.worker.process import WorkerProcess


class LocalProcess(RayProcess):
    """A RayProcess whose worker process is an object of this process."""

    started: list[LocalProcess] = []  # noqa: RUF012 - cleared by the fixture

    def _start(self):
        self.started.append(self)
        process = WorkerProcess(self.roles, self.name, self._log_path, self._threads)
        return SimpleNamespace(call=SimpleNamespace(remote=process.call), stay=SimpleNamespace(remote=process.stay))

    async def ready(self, timeout_s: float) -> None:
        """Nothing to wait for."""

    def kill(self) -> None:
        """The objects end with the test."""


@pytest.fixture
def trained(base_model, tmp_path, monkeypatch):
    """A function that runs the app with local processes; returns the processes and the weights.

    Workers leave their clients and sockets open, because their process ends. Here the clients are
    closed and the rest is collected, or their warnings would fail a later test.
    """
    clients = []

    async def connect(descriptor):
        clients.append(await rl_transferqueue.connect(descriptor))
        return clients[-1]

    @contextlib.asynccontextmanager
    async def no_ray(*_):
        yield
        while clients:
            client = clients.pop()
            await client.close(flush_s=0)
            client._controller.close()  # also while views of rows are alive

    monkeypatch.setattr(build, "connect", connect)
    monkeypatch.setattr(workers, "RayProcess", LocalProcess)
    monkeypatch.setattr(workers, "node_gpus", lambda: 0)
    monkeypatch.setattr(processes, "ray_session", no_ray)
    monkeypatch.setattr(LocalProcess, "started", [])

    def train(name, *overrides):
        LocalProcess.started.clear()
        small = (
            f"model.path={base_model}",
            f"trainer.output_dir={tmp_path}",
            f"trainer.run_name={name}",
            "trainer.total_training_steps=2",
            "trainer.test_freq=0",
            "trainer.val_before_train=false",
            "trainer.logger=console",
            "data.val_size=8",
            "data.train_batch_size=8",
            "actor.ppo_mini_batch_size=4",
            "actor.use_kl_loss=true",
            "actor.optim.lr=1e-3",
            "trainer.threads_per_worker=1",
        )
        with settings_kept():  # workers in this process change them
            assert main([*small, *overrides]) == 0
        return list(LocalProcess.started), load_file(tmp_path / name / "checkpoint" / "model.safetensors")

    train.folder = tmp_path
    yield train
    for process in LocalProcess.started:
        process.actor = None
    gc.unfreeze()  # workers exempt what exists while they are built from collections
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # a worker closes no socket: it ends with its process
        gc.collect()


def test_replicas_that_sleep_during_updates_learn_the_same_bit_for_bit(trained):
    """With `tcp` each has its own copy of the weights; with `shm` they compute in the sender's."""
    apart = ("placement=separate", "rollout.num_workers=2")
    _, expected = trained("awake", *apart)
    processes, weights = trained("asleep", *apart, "rollout.free_cache_engine=true", "checkpoint_engine.backend=tcp")
    assert [process.name for process in processes if process.roles == ("rollout",)] == ["rollout-0", "rollout-1"]
    for name, weight in weights.items():
        np.testing.assert_array_equal(weight, expected[name], err_msg=name)
    steps = [json.loads(line) for line in (trained.folder / "asleep" / "metrics.jsonl").read_text().splitlines()]
    own = sum(weight.nbytes for weight in weights.values())
    assert [step["perf/sleep_freed_bytes"] for step in steps] == [2 * own] * 2
    assert all(step["timing_s/sleep"] > 0 < step["timing_s/wake"] for step in steps)


@pytest.mark.parametrize(("algorithm", "more"), [("grpo", ()), ("ppo", ("critic.ppo_mini_batch_size=4",))])
def test_every_placement_learns_the_same_bit_for_bit(trained, base_model, algorithm, more):
    one = "rollout.num_workers=1"  # log-probs of a response can depend on how many are generated with it
    apart, expected = trained("apart", f"algorithm={algorithm}", "placement=separate", one, *more)
    base = load_file(base_model / "model.safetensors")
    assert any((weight != base[name]).any() for name, weight in expected.items()), "nothing was trained"
    placements = {"fused": 2, "actor+ref": len(apart) - 1}
    for placement, count in placements.items():
        together, weights = trained(placement, f"algorithm={algorithm}", f"placement={placement}", one, *more)
        assert len(together) == count
        assert weights.keys() == expected.keys()
        for name, weight in weights.items():
            np.testing.assert_array_equal(weight, expected[name], err_msg=f"{placement} {name}")
