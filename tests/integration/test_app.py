"""The app end to end on a tiny model: what it writes, what it says, what it leaves behind."""

from __future__ import annotations

import pytest
import yaml

from rl_app_ppo.config import from_yaml

KIB = 1024


def test_grpo_runs_and_writes_everything(app):
    done = app("trainer.total_training_steps=3", "trainer.test_freq=1")
    assert done.code == 0, done.err
    assert done.err == ""
    steps = done.metrics
    assert [m["step"] for m in steps] == [0, 1, 2, 3]
    trained = steps[1:]
    assert {m["perf/driver_bytes"] < 256 * KIB for m in trained} == {True}
    assert [m["weight_sync/version"] for m in trained] == [1, 2, 3]
    assert [m["weight_sync/receivers"] for m in trained] == [2, 2, 2]
    assert [m["training/policy_lag"] for m in trained] == [0, 0, 0]
    # rollout log-probs under the weights of the last sync equal the trainer's under its own: the sync is real and exact
    assert max(m["training/rollout_log_probs_diff_max"] for m in trained) < 1e-4
    assert all(m["actor/grad_norm"] > 0 for m in trained)
    for name in ("config.yaml", "curve.png", "checkpoint/model.safetensors", "logs/rollout-0.log", "logs/driver.log"):
        assert (done.folder / name).stat().st_size > 0, name
        if "logs" not in name:
            assert name.split("/")[0] in done.out
    assert list((done.folder / "tensorboard").glob("events.out.tfevents.*"))
    assert from_yaml((done.folder / "config.yaml").read_text()).trainer.total_training_steps == 3
    assert "step 3/3" in done.out
    assert "validation accuracy" in done.out
    assert "shared memory" in done.out


def test_the_checkpoint_is_a_hugging_face_one_and_can_be_trained_on(app, base_model):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    done = app("actor.optim.lr=1e-3")
    assert done.code == 0, done.err
    checkpoint = done.folder / "checkpoint"
    model, base = (AutoModelForCausalLM.from_pretrained(path) for path in (checkpoint, base_model))
    assert any(not a.equal(b) for a, b in zip(model.parameters(), base.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(checkpoint).encode("37+45=")
    again = app(f"model.path={checkpoint}", "trainer.run_name=again", "trainer.total_training_steps=1")
    assert again.code == 0, again.err


def test_ppo_trains_a_critic(app):
    done = app("algorithm=ppo", "critic.warmup_steps=1")
    assert done.code == 0, done.err
    first, second = done.metrics[1:]
    assert "actor/pg_loss" not in first  # the critic alone
    assert "weight_sync/version" not in first  # so there is nothing to send
    assert second["weight_sync/version"] == 1
    assert "actor/pg_loss" in second
    assert "critic/vf_loss" in second
    assert "critic/values/mean" in second
    assert "timing_s/values" in second


def test_with_the_sync_off_the_run_says_so_and_the_lag_grows(app):
    done = app("checkpoint_engine.enabled=false", "trainer.total_training_steps=3")
    assert done.code == 0, done.err
    assert "SYNC IS OFF" in done.out
    assert [m["training/policy_lag"] for m in done.metrics[1:]] == [0, 1, 2]
    assert not any("weight_sync/version" in m for m in done.metrics)


def test_driver_bytes_do_not_grow_with_the_responses(app):
    used = []
    for length in (8, 16):
        done = app(
            f"rollout.response_length={length}",
            "rollout.ignore_eos=true",
            f"trainer.run_name=length{length}",
            "trainer.total_training_steps=1",
        )
        assert done.code == 0, done.err
        (line,) = [
            m
            for m in map(
                yaml.safe_load, (done.folder.parent / f"length{length}" / "metrics.jsonl").read_text().splitlines()
            )
            if m["step"]
        ]
        assert line["response_length/mean"] == length
        used.append(line["perf/driver_bytes"])
    assert used[1] == pytest.approx(used[0], rel=0.1)
