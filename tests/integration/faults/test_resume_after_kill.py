"""PPO with two processes per model resumes after a kill and ends bit-equal to an unbroken run.

The killed run resumes from its newest complete checkpoint. A single rank learns the same, and can
resume from what two ranks saved.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from app_runs import MARK, PATIENT, command, marked, nothing_left
from relative import apart
from safetensors.numpy import load_file

from rl_trainer.checkpoints.checkpoint_folder import Checkpoint, inspect, newest_whole, step_name

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]
TWO_RANKS = ("model_engine=fsdp", "fsdp.world_size=2", "fsdp.device=cpu")


@pytest.fixture(scope="module")
def runs(tmp_path_factory, base_model):
    """Folders of three runs: killed and resumed, uninterrupted, and one whose last step ran alone.

    The third runs on one rank.
    """
    root = tmp_path_factory.mktemp("runs")

    def arguments(name: str, *more: str) -> list[str]:
        return command(
            "algorithm=ppo",
            PATIENT,
            f"model.path={base_model}",
            f"trainer.output_dir={root}",
            f"trainer.run_name={name}",
            "trainer.test_freq=2",
            "data.val_size=16",
            "data.train_batch_size=8",
            "actor.ppo_mini_batch_size=8",
            "critic.ppo_mini_batch_size=8",
            "critic.warmup_steps=1",
            "rollout.num_workers=1",
            "actor.use_kl_loss=true",  # adds a reference process
            "actor.optim.lr=1e-3",
            *more,
        )

    with nothing_left() as mark:
        environment = {**os.environ, MARK: mark}
        kept = ("trainer.save_freq=1", "trainer.max_ckpt_to_keep=2", "trainer.resume_mode=auto", *TWO_RANKS)
        with (root / "log").open("w") as log:
            endless = arguments("killed", "trainer.total_training_steps=1000", *kept)
            process = subprocess.Popen(endless, stdout=log, stderr=log, env=environment)
        folder, deadline = root / "killed" / "checkpoints", time.monotonic() + 600
        while not (folder / step_name(2)).exists():
            assert process.poll() is None, (root / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for victim in marked(mark):
            with contextlib.suppress(psutil.NoSuchProcess):  # processes end with the driver
                victim.kill()
        process.wait(timeout=300)
        found, _ = newest_whole(folder)
        assert found is not None
        total = found.manifest.step + 2

        def finish(name: str, *more: str) -> str:
            wanted = arguments(name, f"trainer.total_training_steps={total}", *more)
            done = subprocess.run(wanted, capture_output=True, text=True, timeout=500, env=environment)
            assert done.returncode == 0, done.stderr
            return done.stdout

        said = finish("killed", *kept)
        finish("straight", f"trainer.save_freq={total}", *TWO_RANKS)
        alone = finish("alone", f"trainer.resume_mode={folder / step_name(total - 1)}", "model_engine=torch")
    return SimpleNamespace(root=root, total=total, from_step=found.manifest.step, said=said, alone=alone)


def steps_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def checkpoint(run: Path, step: int) -> Checkpoint:
    found = inspect(run / "checkpoints" / step_name(step))
    assert isinstance(found, Checkpoint), found
    return found


def test_actor_reference_and_critic_are_two_processes_each_and_the_critic_learns_first(runs):
    names = {path.name for path in (runs.root / "straight" / "logs").iterdir()}
    assert {f"{role}{rank}.log" for role in ("actor", "ref", "critic") for rank in ("", "-1")} <= names
    first, second = steps_of(runs.root / "straight")[1:3]
    assert "actor/pg_loss" not in first
    assert "weight_sync/version" not in first  # the policy did not change, so nothing is sent
    assert second["weight_sync/version"] == 1
    assert {"actor/pg_loss", "critic/vf_loss", "critic/values/mean", "timing_s/values", "actor/kl_loss"} <= set(second)


def test_a_killed_run_ends_bit_by_bit_as_one_that_was_not(runs):
    """Compares the last checkpoints: model, optimizer, schedule and random state of every rank.

    The position in the data is part of them.
    """
    assert f"resumes after step {runs.from_step} " in runs.said
    killed, straight = (checkpoint(runs.root / name, runs.total) for name in ("killed", "straight"))
    ranks = [f"{role}/rank-0000{n}-of-00002" for role in ("actor", "critic") for n in (0, 1)]
    for name in [f"{rank}.safetensors" for rank in ranks] + ["trainer.json", "reward/worker.json"]:
        assert killed.manifest.files[name] == straight.manifest.files[name], name
    for rank in ranks:
        one, other = (json.loads((found.folder / f"{rank}.json").read_text()) for found in (killed, straight))
        assert one["random"].pop("torch") == other["random"].pop("torch")
        assert {**one, "random": None} == {**other, "random": None}
    weights = [(runs.root / name / "checkpoint" / "model.safetensors").read_bytes() for name in ("killed", "straight")]
    assert weights[0] == weights[1]
    every = list(range(runs.total + 1))
    assert [one["step"] for one in steps_of(runs.root / "killed")] == every
    assert [one["step"] for one in steps_of(runs.root / "straight")] == every


def test_the_newest_and_the_best_checkpoint_stay(runs):
    stay = sorted(path.name for path in (runs.root / "killed" / "checkpoints").iterdir())
    assert stay[-2:] == [step_name(runs.total - 1), step_name(runs.total)]
    assert len(stay) <= 3  # the best one may be older


def test_one_rank_resumes_from_two_and_learns_the_same(runs):
    assert f"resumes after step {runs.total - 1} " in runs.alone
    assert "model_engine: 'fsdp' -> 'torch'" in runs.alone
    assert not (runs.root / "alone" / "logs" / "actor-1.log").exists()
    one, two = (steps_of(runs.root / name)[-1] for name in ("alone", "straight"))
    assert one["step"] == two["step"] == runs.total
    assert one["critic/score/mean"] == pytest.approx(two["critic/score/mean"])
    assert apart(one["actor/pg_loss"], two["actor/pg_loss"], two["critic/advantages/max"]) < 1e-4
    for name in ("actor/grad_norm", "critic/vf_loss", "critic/grad_norm"):
        assert apart(one[name], two[name]) < 1e-4, name
    weights = [load_file(runs.root / name / "checkpoint" / "model.safetensors") for name in ("alone", "straight")]
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[1].items():
        assert np.abs(weights[0][name] - value).max() <= 1e-5 * max(1.0, np.abs(value).max()), name


def test_a_finished_run_is_neither_run_again_nor_started_over(runs, tmp_path):
    """Regression: without its checkpoints, `auto` replaced its config, metrics and model."""
    folder = tmp_path / "straight"
    shutil.copytree(runs.root / "straight", folder)

    def again() -> subprocess.CompletedProcess[str]:
        wanted = ("--config", str(folder / "config.yaml"), f"trainer.output_dir={tmp_path}", "trainer.resume_mode=auto")
        return subprocess.run(command(*wanted), capture_output=True, text=True, timeout=500)

    def content() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}

    before = content()
    done = again()
    assert done.returncode == 0, done.stderr
    assert f"has done its {runs.total} steps already" in done.stdout
    assert content() == before
    shutil.rmtree(folder / "checkpoints")
    before = content()
    refused = again()
    assert refused.returncode == 2
    assert f"finds no whole checkpoint in {folder}: it has a finished model in checkpoint/" in refused.stderr
    assert content() == before
