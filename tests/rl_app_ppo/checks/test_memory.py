"""The data plane's memory and address are checked before anything starts."""

from __future__ import annotations

import pytest

from rl_app_ppo.checks import memory
from rl_app_ppo.checks.memory import available_bytes, check_plane_size, step_bytes, trained_parameters
from rl_app_ppo.cli.main import main
from rl_app_ppo.config.loading import load_config
from rl_protocol import ConfigError
from rl_trainer import LoraConfig, build_graph
from rl_trainer.data.model_families import RoutedLayers

ROLLOUT = 8 + 1 + 4
"""Bytes per token: responses, response_mask, rollout_log_probs."""
OLD, ADV, REF = 4 + 4, 4 + 4, 4
"""Bytes per token: old_log_probs and entropy; advantages and returns; ref_log_prob."""


def bytes_of(*overrides, longest=5, validation_rows=0, routed=None, sessions=None, images=0):
    small = ("data.train_batch_size=2", "actor.ppo_mini_batch_size=2", "rollout.n=3", "rollout.response_length=10")
    config = load_config([*small, "rollout.num_workers=1", *overrides])
    graph = build_graph(config.algorithm, config.actor)
    return step_bytes(config, graph, longest, validation_rows, routed, sessions, image_bytes=images)


@pytest.mark.parametrize(
    ("overrides", "per_prompt"),
    [
        (["actor.use_kl_loss=false"], 10 * 3 * (ROLLOUT + OLD + ADV) + 5 * 8),
        (["actor.use_kl_loss=true"], 10 * 3 * (ROLLOUT + OLD + ADV + REF) + 5 * 8),
        (["actor.use_kl_loss=true", "actor.kl_loss_topk=7"], 10 * 3 * (ROLLOUT + OLD + ADV + REF + 7 * (4 + 4)) + 5 * 8),
        (["actor.use_kl_loss=false", "algorithm.adv_estimator=remax"], 10 * (3 * (ROLLOUT + OLD + ADV) + ROLLOUT) + 5 * 8),
        (
            ["actor.use_kl_loss=false", "algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=2"],
            10 * (2 * 3 * ROLLOUT + 3 * (OLD + ADV)) + 2 * 5 * 8,
        ),
    ],
)  # fmt: skip
def test_bytes_of_a_step_by_hand(overrides, per_prompt):
    assert bytes_of(*overrides) == 2 * per_prompt


def test_images_are_stored_once_for_a_prompt():
    assert bytes_of(images=700) == bytes_of() + 2 * 700
    rounds = ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=3"]
    assert bytes_of(*rounds, images=700) == bytes_of(*rounds) + 2 * 3 * 700
    assert bytes_of(validation_rows=1000, images=700) == bytes_of(validation_rows=1000) + 1000 * 700


def test_adapters_of_experts_are_counted_as_peft_makes_them(moe_model):
    """Two layers; the base has 4 experts with gate and up [16, 32] and down [32, 16]."""
    lora = LoraConfig(rank=3, target_modules=("o_proj", "gate_proj", "up_proj", "down_proj"))
    o_proj, gate_up, down = 3 * (32 + 32), 4 * 3 * (32 + 2 * 16), 4 * 3 * (16 + 32)
    assert trained_parameters(moe_model, lora) == 2 * (o_proj + gate_up + down)
    without = LoraConfig(rank=3, target_modules=lora.target_modules, exclude=("layers.0.mlp.experts.down_proj",))
    assert trained_parameters(moe_model, without) == 2 * (o_proj + gate_up) + down


def test_the_experts_of_each_token_count():
    """Three experts of each token of prompt and response, in two layers, of two bytes."""
    layers = RoutedLayers(layers=2, experts=8, top_k=3)
    plain = bytes_of("actor.use_kl_loss=false")
    assert bytes_of("actor.use_kl_loss=false", routed=layers) == plain
    for replay in ("R2", "R3"):
        replayed = bytes_of("actor.use_kl_loss=false", f"algorithm.router_replay={replay}", routed=layers)
        assert replayed == plain + 2 * 3 * (10 + 5) * 2 * 3 * 2


def test_prompts_whose_answer_alone_is_trained_on_have_one_row():
    assert bytes_of("actor.use_kl_loss=false", sessions=1) == 2 * (10 * (ROLLOUT + OLD + ADV) + 5 * 8)
    assert bytes_of("actor.use_kl_loss=false", sessions=3) == bytes_of("actor.use_kl_loss=false")


def test_a_validation_set_that_is_larger_than_a_step_counts(tmp_path):
    assert bytes_of("rollout.val_kwargs.n=4", validation_rows=1000) == 1000 * (4 * 10 * ROLLOUT + 5 * 8)


def test_rows_that_a_journal_keeps_need_no_memory():
    kept = ("actor.use_kl_loss=false", "transfer_queue.durability=commit", "trainer.save_freq=4")
    assert bytes_of(*kept) == 2 * (10 * 3 * (ROLLOUT + OLD + ADV) + 5 * 8)
    assert bytes_of(*kept, "async_rl.max_staleness=2") == 2 * bytes_of(*kept), "one is on the disk meanwhile"
    assert bytes_of(kept[0], "async_rl.max_staleness=2") == 3 * bytes_of(*kept)


def test_the_least_capacity_is_named_and_is_enough():
    config = load_config(["transfer_queue.capacity_mb=10"])
    check_plane_size(config, 9 << 20)
    with pytest.raises(
        ConfigError,
        match=r"transfer_queue\.capacity_mb=10 is too small: .* Set transfer_queue\.capacity_mb=22 ",
    ):
        check_plane_size(config, 20 << 20)
    check_plane_size(load_config(["transfer_queue.capacity_mb=22"]), 20 << 20)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("transfer_queue.capacity_mb=2", ["transfer_queue.capacity_mb=2 is too small", "rollout.response_length"]),
        ("transfer_queue.listen=10.77.0.1:5600", ["transfer_queue.listen='10.77.0.1:5600'", "RL_TQ_KEY_FILE"]),
        (
            "transfer_queue={durability: commit, journal_dir: /proc/version}",
            ["transfer_queue.journal_dir must be a folder", "got /proc/version"],
        ),
        ("transfer_queue.listen=127.0.0.1:99999", ["transfer_queue.listen", "port in 1..65535", "host:port"]),
        ("transfer_queue.backend=simpel", ["transfer_queue.backend", "Did you mean 'simple'?"]),
        ("transfer_queue.backend=memory", ["transfer_queue.backend=memory keeps rows in the memory of one process"]),
    ],
)
def test_each_ends_with_exit_code_2_and_leaves_nothing(tmp_path, monkeypatch, capsys, override, words):
    for name in ("RL_TQ_KEY", "RL_TQ_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    large = ("data.train_batch_size=512", "rollout.n=32") if "capacity" in override else ()
    assert main([override, *large, f"trainer.output_dir={tmp_path / 'outputs'}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    for word in words:
        assert word in error
    assert not (tmp_path / "outputs").exists()


def test_batches_that_are_generated_ahead_need_room_beside_a_validation():
    batch, validated = bytes_of(), bytes_of(validation_rows=10**6)
    assert bytes_of("async_rl.max_staleness=2", validation_rows=10**6) == 3 * batch + validated


def test_the_memory_limit_of_a_container_counts(monkeypatch):
    monkeypatch.setattr(memory, "memory_left", lambda: 5)
    assert available_bytes() == 5
    monkeypatch.setattr(memory, "memory_left", lambda: 2**62)
    assert 0 < available_bytes() < 2**62
    monkeypatch.setattr(memory, "memory_left", lambda: None)
    assert available_bytes() > 0
