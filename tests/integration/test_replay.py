"""`rl replay` computes a step of a real run again, and finds what differs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from app_runs import marked, started

from rl_trainer.checkpoints.kept_batches import kept_steps

KEPT = ("trainer.keep_batches=-1", "trainer.save_freq=2", "trainer.test_freq=0", "actor.optim.lr=1e-3")


def replay(*words: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("rl")), "replay", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=500)


@pytest.mark.slow
def test_a_step_without_a_kept_batch_is_generated_again_if_the_run_is_deterministic(app):
    run = app(
        "trainer.total_training_steps=4",
        "trainer.save_freq=2",
        "trainer.test_freq=0",
        "trainer.deterministic=true",
        "trainer.threads_per_worker=1",
        "actor.optim.lr=1e-3",
    )
    assert run.code == 0, run.err
    before = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    done = replay(str(run.folder), "--step", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 4 was computed again from checkpoint step-000002" in done.stdout
    assert "parameters and optimizer: equal" in done.stdout
    assert {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()} == before


@pytest.mark.nightly
def test_a_killed_run_with_adapters_is_trained_again_on_its_batches(tmp_path, base_model, mark):
    """The run samples with several threads and is not deterministic; the dropout of its adapters
    draws from the random state of its processes."""
    folder = tmp_path / "run"
    small = (f"model.path={base_model}", "data.val_size=8", "data.train_batch_size=8", "actor.ppo_mini_batch_size=8")
    lora = ("lora.rank=4", "lora.dropout=0.2", "actor.use_kl_loss=false", "rollout.num_workers=1")
    process = started(
        mark,
        folder,
        *small,
        *lora,
        *KEPT,
        "trainer.total_training_steps=1000",
        "trainer.val_before_train=false",
        lines=4,
    )
    for victim in marked(mark):
        try:
            os.kill(victim.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.communicate(timeout=60)
    psutil.wait_procs(marked(mark), timeout=60)
    assert set(kept_steps(folder / "batches")) >= {1, 2, 3}
    done = replay(str(folder), "--step", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 3 was trained again on its kept batch, from " in done.stdout
    assert "parameters and optimizer: equal" in done.stdout

    metrics = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    (third,) = [line for line in lines if line["step"] == 3]
    third["actor/pg_loss"] += 1e-9
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = replay(str(folder), "--step", "3", "--json")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert [(line["step"], line["name"], line["run"]) for line in found["differences"]] == [
        (3, "actor/pg_loss", repr(third["actor/pg_loss"]))
    ]
    assert found["weights"]


@pytest.mark.nightly
def test_an_asynchronous_step_is_trained_again_and_its_first_difference_from_another_run_is_named(app, tmp_path):
    more = (*KEPT, "trainer.deterministic=true", "trainer.threads_per_worker=1", "async_rl.max_staleness=1")
    for name, seed in (("one", 0), ("two", 1)):
        run = app(*more, f"trainer.run_name={name}", "trainer.total_training_steps=3", f"trainer.seed={seed}")
        assert run.code == 0, run.err
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    done = replay(one, "--step", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "from checkpoint step-000002" in done.stdout
    differs = replay(one, "--step", "3", "--against", two)
    assert differs.returncode == 1
    assert differs.stdout.splitlines()[1].startswith("step 1: ")
    assert replay(one, "--step", "3", "--against", one).returncode == 0
    (text,) = json.loads(replay(one, "--step", "3", "--row", "0", "--field", "prompts_text", "--json").stdout).values()
    assert text["prompts_text"].endswith("=")


@pytest.mark.nightly
@pytest.mark.parametrize(
    "more",
    [
        ("algorithm=ppo", "critic.warmup_steps=1"),
        ("algorithm=ppo", "model_engine=fsdp", "fsdp.world_size=2", "fsdp.device=cpu"),
        ("model_engine=megatron", "lora.rank=4"),
    ],
    ids=["critic", "two ranks", "megatron"],
)
def test_every_engine_trains_a_kept_batch_again(app, more):
    run = app(*KEPT, *more, "trainer.total_training_steps=3")
    assert run.code == 0, run.err
    for step in ("1", "3"):
        done = replay(str(run.folder), "--step", step)
        assert done.returncode == 0, done.stdout + done.stderr
