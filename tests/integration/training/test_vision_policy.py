"""A vision policy in the whole app: rows with images are trained on, saved and resumed."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from app_runs import MARK, command, nothing_left
from PIL import Image

from rl_trainer.checkpoints.checkpoint_folder import step_name

pytestmark = pytest.mark.timeout(900)
COLOURS = {"r": (220, 30, 30), "g": (30, 200, 40), "b": (40, 60, 230)}


def square(rng, colour, size=(16, 16)):
    noisy = np.clip(np.array(COLOURS[colour]) + rng.normal(0, 12, (*size, 3)), 0, 255)
    file = io.BytesIO()
    Image.fromarray(noisy.astype(np.uint8)).save(file, "PNG")
    return file.getvalue()


def write_squares(path, count, seed):
    """Write rows in verl's format that ask for the color of a square of 4 or 6 tokens.

    The images are stored as Hugging Face stores them.
    """
    rng, rows = np.random.default_rng(seed), []
    for i in range(count):
        colour = "rgb"[i % 3]
        rows.append(
            {
                "data_source": "colours",
                "prompt": [{"role": "user", "content": "<image>colour"}],
                "reward_model": {"style": "rule", "ground_truth": colour},
                "extra_info": {"index": i},
                "images": [{"bytes": square(rng, colour, (16, 16 + 8 * (i % 2))), "path": None}],
            }
        )
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.fixture(scope="module")
def squares(tmp_path_factory):
    folder = tmp_path_factory.mktemp("squares")
    return write_squares(folder / "train.parquet", 96, 0), write_squares(folder / "val.parquet", 24, 1)


@pytest.fixture(scope="module")
def sighted(make_vision_model):
    return make_vision_model("qwen2_vl")


def settings(sighted, squares):
    train, val = squares
    return (
        f"model.path={sighted}",
        f"data.train_files={train}",
        f"data.val_files={val}",
        "rollout.response_length=1",
        "rollout.n=16",
        "actor.optim.lr=3e-3",
        "actor.optim.lr_warmup_steps=0",
        "data.train_batch_size=24",
        "actor.ppo_mini_batch_size=12",
        "trainer.test_freq=5",
    )


def train(root, mark, name, *overrides):
    """Run the app as a user does, in a folder `name` below `root`."""
    here = (f"trainer.output_dir={root}", f"trainer.run_name={name}", *overrides)
    return subprocess.run(
        command(*here), capture_output=True, text=True, timeout=500, env={**os.environ, MARK: mark}, cwd=root
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory, sighted, squares):
    """Folders of a run, and of one that resumes from its checkpoint with the same result."""
    root = tmp_path_factory.mktemp("runs")
    steps = (*settings(sighted, squares), "trainer.total_training_steps=10", "trainer.save_freq=5")
    with nothing_left() as mark:
        straight = train(root, mark, "straight", *steps)
        assert straight.returncode == 0, straight.stderr
        again = f"trainer.resume_mode={root / 'straight' / 'checkpoints' / step_name(5)}"
        resumed = train(root, mark, "resumed", *steps, again)
        assert resumed.returncode == 0, resumed.stderr
    return SimpleNamespace(root=root, said=resumed.stdout)


def metrics_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_it_learns_to_name_colours_and_the_driver_holds_no_pixels(runs):
    lines = metrics_of(runs.root / "straight")
    assert [line["step"] for line in lines] == list(range(11))
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert lines[1]["critic/score/mean"] < 0.3
    assert lines[-1]["critic/score/mean"] > 0.5
    # greedy answers to squares that are not in the training data
    assert lines[-1]["val-core/colours/acc/mean@1"] > 0.6
    assert max(line.get("training/rollout_log_probs_diff_max", 0.0) for line in lines) < 1e-4
    assert lines[-1]["prompt_length/max"] == 16  # 6 of them are image tokens
    # Bytes of a step: 24 prompts with 16 or 24 patches of 96 numbers each.
    pixels = 24 * 20 * 96 * 4
    assert lines[5]["perf/driver_bytes"] < pixels / 2


@pytest.mark.slow
def test_it_is_saved_and_gone_on_with(runs, sighted):
    assert "resumes after step 5 " in runs.said
    weights = [(runs.root / name / "checkpoint" / "model.safetensors").read_bytes() for name in ("straight", "resumed")]
    assert weights[0] == weights[1]
    saved = runs.root / "straight" / "checkpoint"
    assert (saved / "preprocessor_config.json").read_bytes() == (sighted / "preprocessor_config.json").read_bytes()
    assert weights[0] != (sighted / "model.safetensors").read_bytes()


MENTIONS = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.count(ground_truth))
"""


@pytest.mark.vllm
def test_vllm_shows_the_images_to_the_policy(tmp_path, mark, make_vision_model, squares):
    """Its log-probs are the trainer's after each adapter it gets, so both see the same patches."""
    (tmp_path / "mentions.py").write_text(MENTIONS)
    done = train(
        tmp_path,
        mark,
        "run",
        *settings(make_vision_model("qwen2_vl", hidden=64, heads=2), squares),
        "rollout.name=vllm",
        "rollout.kv_cache_mb=64",
        "rollout.response_length=2",
        *("--trust", "mentions.py", "reward.function=mentions.py:compute_score"),
        "ray.start_timeout_s=400",
        "trainer.total_training_steps=3",
        "lora.rank=8",
    )
    assert done.returncode == 0, done.stderr
    trained = [line for line in metrics_of(tmp_path / "run") if line["step"]]
    assert [line["weight_sync/version"] for line in trained] == [1, 2, 3]
    assert max(line["training/rollout_log_probs_diff_max"] for line in trained) < 1e-3
    assert all(line["actor/grad_norm"] > 0 for line in trained)


SHARDED = ("model_engine=fsdp", "fsdp.world_size=2", "fsdp.device=cpu", "lora.rank=4", "critic.use_lora=true")


@pytest.mark.nightly
@pytest.mark.parametrize("more", [(), SHARDED])
def test_ppo_with_a_critic_and_a_reference_that_see(tmp_path, mark, make_vision_model, squares, more):
    done = train(
        tmp_path,
        mark,
        "run",
        "algorithm=ppo",
        *settings(make_vision_model("qwen2_5_vl"), squares),
        "critic.ppo_mini_batch_size=12",
        "actor.use_kl_loss=true",
        f"reference.path={make_vision_model('qwen2_vl', hidden=64)}",
        "rollout.num_workers=2",
        "trainer.total_training_steps=2",
        *more,
    )
    assert done.returncode == 0, done.stderr
    last = metrics_of(tmp_path / "run")[-1]
    assert {"critic/vf_loss", "actor/kl_loss", "actor/pg_loss"} <= set(last)
    assert all(math.isfinite(value) for value in last.values())


@pytest.mark.slow
def test_images_for_a_model_of_text_end_the_run_before_it_starts(tmp_path, mark, base_model, squares):
    done = train(tmp_path, mark, "run", *settings(base_model, squares))
    assert done.returncode == 2
    wanted = f"train.parquet, row 1 has images, and {base_model} (Qwen2ForCausalLM) reads only text."
    assert wanted in " ".join(done.stderr.split())
    assert not (tmp_path / "run").exists()
