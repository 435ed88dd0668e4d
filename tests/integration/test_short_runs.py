"""The app end to end on a tiny model: its files, its messages, and what it leaves behind."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
from documented_metrics import assert_documented
from relative import apart

from rl_app_ppo.config.loading import from_yaml

KIB = 1024


def test_grpo_runs_and_writes_everything(app):
    done = app(
        "trainer.total_training_steps=3", "trainer.test_freq=1", "rollout.num_workers=2", "actor.use_kl_loss=true"
    )
    assert done.code == 0, done.err
    assert done.err == ""
    steps = done.metrics
    assert [m["step"] for m in steps] == [0, 1, 2, 3]
    assert_documented({name for m in steps for name in m} - {"step"})
    trained = steps[1:]
    assert {m["perf/driver_bytes"] < 256 * KIB for m in trained} == {True}
    assert [m["weight_sync/version"] for m in trained] == [1, 2, 3]
    assert [m["weight_sync/receivers"] for m in trained] == [2, 2, 2]
    assert [m["training/off_policy/trajectory_staleness_worst/max"] for m in trained] == [0, 0, 0]
    # The rollout's log-probs under the weights of the last sync equal the trainer's under its own:
    # the sync is real and exact.
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


@pytest.mark.slow
def test_the_checkpoint_is_a_hugging_face_one_and_driver_bytes_do_not_grow_with_the_responses(app, base_model):
    """The second run trains on the checkpoint of the first, with responses twice as long."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    steps = ("rollout.ignore_eos=true", "trainer.total_training_steps=1")
    # they change the weights even if all answers of a step score the same
    learns = (
        "actor.optim.lr=1e-3",
        "actor.entropy_coeff=0.01",
    )
    done = app(*steps, *learns, "rollout.response_length=8")
    assert done.code == 0, done.err
    checkpoint = done.folder / "checkpoint"
    model, base = (AutoModelForCausalLM.from_pretrained(path) for path in (checkpoint, base_model))
    assert any(not a.equal(b) for a, b in zip(model.parameters(), base.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(checkpoint).encode("37+45=")
    again = app(*steps, f"model.path={checkpoint}", "trainer.run_name=again", "rollout.response_length=16")
    assert again.code == 0, again.err
    used = {}
    for folder in (done.folder, done.folder.parent / "again"):
        (line,) = [m for m in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if m["step"]]
        used[line["response_length/mean"]] = line["perf/driver_bytes"]
    assert sorted(used) == [8, 16]
    assert used[16] == pytest.approx(used[8], rel=0.1)


@pytest.mark.slow
def test_with_the_sync_off_the_run_says_so_and_the_lag_grows(app):
    done = app("checkpoint_engine.enabled=false", "trainer.total_training_steps=3")
    assert done.code == 0, done.err
    assert "SYNC IS OFF" in done.out
    assert [m["training/off_policy/trajectory_staleness_worst/max"] for m in done.metrics[1:]] == [0, 1, 2]
    assert not any("weight_sync/version" in m for m in done.metrics)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
def test_lora_trains_an_adapter_and_needs_no_reference_process(app, base_model, engine):
    """Two processes share the actor with FSDP2 and with Megatron.

    FSDP2 splits the rows between them by key; with Megatron both get the same rows. Both send their
    shards of the adapter.
    """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    more = {
        "fsdp": ["fsdp.world_size=2", "fsdp.device=cpu"],
        "megatron": ["megatron.tensor_model_parallel_size=2"],
    }[engine]
    more += ["actor.use_kl_loss=true", "actor.optim.lr=1e-2", "trainer.total_training_steps=3"]
    done = app(f"model_engine={engine}", "lora.rank=4", *more)
    assert done.code == 0, done.err
    trained = done.metrics[1:]
    assert [m["weight_sync/version"] for m in trained] == [1, 2, 3]
    assert max(m["training/rollout_log_probs_diff_max"] for m in trained) < 1e-4
    # rank 4 of the demo model's two layers in float32: q, k, v and o are 128 x 128, gate and up
    # 256 x 128, down 128 x 256
    assert {m["weight_sync/bytes"] for m in trained} == {4 * 4 * 2 * (4 * (128 + 128) + 3 * (128 + 256))}
    assert apart(trained[0]["actor/ref_kl"], 0.0, trained[0]["actor/entropy"]) < 1e-6
    assert trained[-1]["actor/ref_kl"] > 1e-4
    assert max(m["perf/driver_bytes"] for m in trained) < 256 * KIB
    logs = {path.name for path in (done.folder / "logs").iterdir()}
    assert "ref.log" not in logs
    assert "actor-1.log" in logs
    base = AutoModelForCausalLM.from_pretrained(base_model)
    adapted = PeftModel.from_pretrained(base, done.folder / "checkpoint").merge_and_unload().state_dict()
    before = AutoModelForCausalLM.from_pretrained(base_model).state_dict()
    changed = {name.split(".")[-2] for name in before if not before[name].equal(adapted[name])}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.slow
def test_megatron_trains_all_weights_beside_a_reference_and_a_critic(app, base_model):
    """Policy, reference and critic run in two processes each, which split every layer.

    Whole weights are sent to the rollout and written to the checkpoint.
    """
    from transformers import AutoModelForCausalLM

    cut = ["megatron.tensor_model_parallel_size=2", "megatron.sequence_parallel=true"]
    more = [*cut, "actor.use_kl_loss=true", "actor.optim.lr=1e-3"]
    done = app("model_engine=megatron", "algorithm=ppo", "trainer.save_freq=2", *more, timeout=500)
    assert done.code == 0, done.err
    assert {"actor-1.log", "ref-1.log", "critic-1.log"} <= {path.name for path in (done.folder / "logs").iterdir()}
    first, second = done.metrics[1:]
    assert [m["weight_sync/version"] for m in (first, second)] == [1, 2]
    assert max(m["training/rollout_log_probs_diff_max"] for m in (first, second)) < 1e-4
    assert apart(first["actor/ref_kl"], 0.0, first["actor/entropy"]) < 1e-6
    # the estimate from sampled tokens has either sign
    assert apart(second["actor/ref_kl"], 0.0, first["actor/entropy"]) > 1e-6
    assert first["critic/vpred_mean"] == 0
    assert second["critic/vpred_mean"] != 0
    assert first["critic/vf_loss"] > 0
    shards = {f"stage-00000-shard-0000{rank}.safetensors" for rank in range(2)}
    (critic,) = done.folder.glob("checkpoints/*/critic")
    assert {path.name for path in critic.iterdir()} == {"adapter_state.json", *shards}
    model, base = (
        AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (done.folder / "checkpoint", base_model)
    )
    assert not [name for name in base if base[name].equal(model[name])]


@pytest.mark.slow
def test_megatron_sends_an_output_layer_that_is_tied_to_the_embedding(app, base_model, tmp_path):
    """Small models have one; their checkpoints, and Megatron, have no name of its own for it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = shutil.copytree(base_model, tmp_path / "tied")
    config = AutoConfig.from_pretrained(base_model, tie_word_embeddings=True)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    done = app(
        f"model.path={folder}", "model_engine=megatron", "actor.optim.lr=1e-2", "algorithm.old_log_prob=recompute"
    )
    assert done.code == 0, done.err
    trained = done.metrics[1:]
    assert [m["weight_sync/version"] for m in trained] == [1, 2]
    assert max(m["training/rollout_log_probs_diff_max"] for m in trained) < 1e-4


@pytest.mark.nightly
def test_replicas_of_megatron_share_the_optimizers_state_and_other_layouts_go_on_from_it(app):
    """Each replica saves its part of policy and critic; a tensor-parallel run reads all parts."""
    same = ["model_engine=megatron", "algorithm=ppo", "lora.rank=4", "trainer.save_freq=1"]
    first = app(*same, "megatron.world_size=2", "megatron.distributed_optimizer=true", timeout=500)
    assert first.code == 0, first.err
    for role in ("actor", "critic"):
        (folder, *_) = sorted(first.folder.glob(f"checkpoints/*/{role}"))
        parts = {path.name for path in folder.glob("stage-*")}
        assert parts == {f"stage-00000-shard-00000-replica-0000{replica}.safetensors" for replica in range(2)}
    cut = ["megatron.tensor_model_parallel_size=2", "trainer.resume_mode=auto", "trainer.total_training_steps=3"]
    again = app(*same, *cut, timeout=500)
    assert again.code == 0, again.err
    assert [m["step"] for m in again.metrics] == [0, 1, 2, 3]
    assert max(m["training/rollout_log_probs_diff_max"] for m in again.metrics[1:]) < 1e-4


@pytest.mark.slow
def test_dynamic_filtering_refills_and_is_bounded(app):
    done = app(
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.max_num_gen_batches=2",
        "reward.overlong.buffer_len=2",
    )
    assert done.code == 0, done.err
    for step in done.metrics[1:]:
        assert 1 <= step["training/filter_groups/rounds"] <= 2
        kept, made = (step[f"training/filter_groups/prompts_{word}"] for word in ("kept", "generated"))
        assert kept <= 8 <= made <= 16


@pytest.mark.slow
def test_a_logger_gets_a_table_of_the_samples_of_each_step(app, monkeypatch):
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    done = app("trainer.logger=[console,mlflow]", "trainer.total_training_steps=3", "trainer.samples_per_step=8")
    assert done.code == 0, done.err
    tables = sorted(done.folder.glob("mlflow/*/*/artifacts/samples/*.json"))
    assert [path.stem for path in tables] == ["000001", "000002", "000003"]
    for step, path in enumerate(tables, 1):
        table = json.loads(path.read_text())
        rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
        assert {row["step"] for row in rows} == {step}
        assert len(rows) == 8
        assert all(row["prompt"].endswith("=") and row["reward"] in (0.0, 1.0) for row in rows)


@pytest.mark.slow
def test_files_and_a_reward_of_ones_own(app, tmp_path, monkeypatch):
    """The example in docs/guides/data.md, with a bad row and a reward that sometimes raises."""
    data = tmp_path / "data"
    task = ["-m", "rl_app_ppo.demo.tasks", "arithmetic", str(data), "--train", "100", "--val", "20"]
    subprocess.run([sys.executable, *task], check=True, capture_output=True, timeout=500)
    with (data / "train.jsonl").open("a") as file:
        file.write('{"prompt": []}\n')
    (tmp_path / "near.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    if solution_str.endswith('1'):\n"
        "        raise ValueError('a one')\n"
        "    right = sum(a == b for a, b in zip(solution_str, ground_truth))\n"
        "    return {'score': right / 3, 'acc': float(solution_str == ground_truth), 'pred': solution_str}\n"
    )
    files = [f"data.train_files={data}/train.jsonl", f"data.val_files={data}/val.jsonl", "data.val_size=512"]
    files += ["rollout.response_length=4", "actor.optim.lr=4e-4"]
    reward = ("--trust", f"{tmp_path}/near.py", f"reward.function=0.75*exact_match,0.25*{tmp_path}/near.py:score")
    validation = ["rollout.val_kwargs.n=4", "rollout.val_kwargs.temperature=1"]
    refused = app(*files, *reward, "trainer.run_name=refused")
    assert refused.code == 2
    assert f"1 bad row: {data}/train.jsonl, row 101: " in refused.err
    done = app(*files, *reward, *validation, "data.on_bad_row=skip")
    assert done.code == 0, done.err
    before = done.metrics[0]
    for name in ("mean@4", "best@4/mean", "maj@4/mean", "pass@4"):
        assert 0 <= before[f"val-core/sums/acc/{name}"] <= 1
    assert sum(m.get("reward/failures/exception", 0) for m in done.metrics[1:]) > 0
    assert all(m["critic/score/mean"] > 0 for m in done.metrics[1:])
    table = [json.loads(line) for line in (done.folder / "samples" / "0.jsonl").read_text().splitlines()]
    assert len(table) == 20 * 4
    assert {row["outcome"]["type"] for row in table} == {"scored", "failure"}
    assert all(
        row["outcome"]["message"].endswith("raised ValueError: a one")
        for row in table
        if row["outcome"]["type"] == "failure"
    )
    assert "reward failed (exception) for sample" in (done.folder / "logs" / "reward.log").read_text()
    (warning,) = [line for line in done.out.splitlines() if "reward.function failed on" in line and "step 0" in line]
    assert (
        f"raised ValueError: a one ({tmp_path}/near.py:3). Each failure is in {done.folder}/logs/reward.log" in warning
    )
