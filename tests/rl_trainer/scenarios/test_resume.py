"""A stopped run resumes from the newest complete checkpoint and gives the same weights.

The weights are equal bit for bit.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from resumable_run import SCENARIOS, Run

from rl_trainer.backends.snapshot import RandomState, seed_generators
from rl_trainer.checkpoints.checkpoint_folder import Checkpoint, inspect, newest_whole, step_name

PROGRAMS = Path(__file__).parents[1] / "programs"
KILLED_IN_CI = ("gae", "asynchronous")
"""Scenarios whose run is killed in CI; those of the others are in the nightly suite."""
SEED = 3
"""Torch's seed, as resumable_run.py sets it."""
QUICK = {"OMP_NUM_THREADS": "1", **os.environ}


def same(a, b):
    assert a.keys() == b.keys()
    return all(np.array_equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    "scenario", sorted(SCENARIOS.keys() - {"asynchronous"})
)  # whose last steps sample nothing ahead
def test_two_and_two_steps_equal_four_bit_by_bit(model_path, tmp_path, scenario):
    torch.manual_seed(SEED)
    straight = Run(model_path, None, steps=4, **SCENARIOS[scenario])
    straight.fit()
    torch.manual_seed(SEED)
    first = Run(model_path, tmp_path, steps=2, **SCENARIOS[scenario])
    first.fit()
    torch.manual_seed(SEED + 1)  # adapters draw their dropout from this state
    second = Run(model_path, tmp_path, steps=4, **SCENARIOS[scenario])
    second.fit()
    assert not same(first.weights(), second.weights())
    assert same(straight.weights(), second.weights())
    assert sorted(second.metrics) == [3, 4]
    untimed = {
        k: v for k, v in straight.metrics[4].items() if not k.startswith(("timing", "perf", "idle", "checkpoint"))
    }
    assert untimed == {k: second.metrics[4][k] for k in untimed}


def test_what_draws_without_a_seed_follows_from_the_key():
    def drawn(*key):
        seed_generators(*key)
        return RandomState.now(), torch.rand(1).item(), np.random.random(), random.random()

    first = drawn(3, 1)
    assert drawn(3, 1) == first
    assert not set(drawn(3, 2)[1:]) & set(first[1:])


def test_a_checkpoint_is_whole_and_its_policy_loads(model_path, tmp_path):
    from transformers import AutoModelForCausalLM

    run = Run(model_path, tmp_path, steps=2, estimator="gae")
    run.fit()
    found = inspect(tmp_path / step_name(2))
    assert isinstance(found, Checkpoint)
    names = {name for name in found.manifest.files if not name.startswith("hf/")}
    assert names == {
        "config.yaml",
        "trainer.json",
        "reward/worker.json",
        *(f"{role}/rank-00000-of-00001.{kind}" for role in ("actor", "critic") for kind in ("json", "safetensors")),
    }
    assert (found.run_state.step, found.run_state.version, found.run_state.critic_updates) == (2, 1, 2)
    assert found.run_state.prompts_taken == 8
    loaded = AutoModelForCausalLM.from_pretrained(found.folder / "hf").state_dict()
    weights = run.weights()
    assert all(np.array_equal(weights[name], tensor.numpy()) for name, tensor in loaded.items())


def start(program, *arguments, log):
    return subprocess.Popen(
        [sys.executable, str(PROGRAMS / program), *map(str, arguments)], stdout=log, stderr=log, env=QUICK
    )


@pytest.fixture(scope="module")
def ranks(model_path, tmp_path_factory):
    """Folder with the weights of resumable_ranks.py on one and two ranks, straight and resumed."""
    root = tmp_path_factory.mktemp("ranks")
    for sources in [], [1, 2]:
        for size in (1, 2):
            with (root / "log").open("a") as log:
                process = start("resumable_ranks.py", size, model_path, root, *sources, log=log)
            try:
                code = process.wait(timeout=600)
            finally:
                process.kill()
            assert code == 0, (root / "log").read_text()[-3000:]
    return root


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("scenario", ["full", "lora", "dropout", "critic"])
@pytest.mark.parametrize("size", [1, 2])
def test_fsdp_resumes_bit_equal_and_on_another_number_of_ranks(ranks, size, scenario):
    folder, other = ranks / str(size) / scenario, 3 - size
    straight = dict(np.load(folder / "straight.npz"))
    assert same(straight, dict(np.load(folder / f"from-{size}-on-{size}.npz")))
    if scenario != "dropout":  # each rank draws its own dropout
        moved = dict(np.load(folder / f"from-{other}-on-{size}.npz"))
        assert moved.keys() == straight.keys()
        for name, value in straight.items():
            assert np.abs(moved[name] - value).max() <= 1e-5 * max(1.0, np.abs(value).max()), name


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "scenario",
    [pytest.param(name, marks=pytest.mark.slow if name in KILLED_IN_CI else pytest.mark.nightly) for name in SCENARIOS],
)
def test_a_killed_run_ends_with_the_weights_of_one_that_was_not(model_path, tmp_path, scenario):
    torch.manual_seed(SEED)
    straight = Run(model_path, None, steps=6, **SCENARIOS[scenario])
    straight.fit()
    folder, out = tmp_path / "checkpoints", tmp_path / "out.npz"
    for kill in (True, False):
        with (tmp_path / "log").open("w") as log:
            process = start("resumable_run.py", model_path, folder, scenario, 6, out, log=log)
        deadline = time.monotonic() + 300
        while kill and not (folder / step_name(3)).exists():
            assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.005)
        if kill:
            process.kill()
        assert process.wait(timeout=600) == (-9 if kill else 0), (tmp_path / "log").read_text()[-3000:]
        assert out.exists() != kill
    assert same(straight.weights(), dict(np.load(out)))


def wait_for_save(folder, step, files, process):
    """Wait until the save of `step`, or a later one, has `files` of its 192 files.

    This is the same point of the save on a fast and on a slow machine.
    """
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        # the folder may be published or removed meanwhile
        with contextlib.suppress(FileNotFoundError):
            for saving in folder.glob(".saving-step-*"):
                if int(saving.name[-6:]) >= step and sum(1 for _ in saving.glob("*/*.txt")) >= files:
                    return
        time.sleep(0.001)
    raise AssertionError(f"the save of step {step} did not come to {files} files; exit code {process.poll()}")


def test_killed_at_ten_points_of_a_save_there_is_always_the_last_whole_checkpoint(tmp_path):
    folder, rng, published, halves = tmp_path / "checkpoints", random.Random(5), 0, 0
    for attempt in range(10):
        command = [sys.executable, str(PROGRAMS / "saving_loop.py"), str(folder), "1"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=QUICK) as process:
            assert process.stdout.readline() == "ready\n"
            wait_for_save(folder, published + 1 + attempt % 2, rng.randrange(150), process)
            process.kill()
            said = process.stdout.read().splitlines()
        published = max([published, *map(int, said)])
        halves += any(folder.glob(".saving-*"))
        found, skipped = newest_whole(folder)
        assert not skipped
        if found is None:
            assert published == 0
            continue
        # the program may be killed between publishing a checkpoint and printing its step
        assert found.manifest.step - published in (0, 1)
        published = found.manifest.step
        assert len(found.manifest.files) == 3 * 64 + 2
        assert (found.folder / "critic" / "63.txt").read_text() == str(published) * 4096
    assert published >= 3
    assert halves >= 3  # otherwise the kills missed the saves
    assert {path.name for path in folder.glob("step-*")} <= {step_name(n) for n in (1, published - 1, published)}
