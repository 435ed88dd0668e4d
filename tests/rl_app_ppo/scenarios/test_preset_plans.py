"""Every preset for a user's model and GPUs is planned without GPUs, weights or data."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import Qwen2Config, Qwen3Config, Qwen3MoeConfig

from rl_app_ppo.checks.memory import check_memory
from rl_app_ppo.checks.process_memory import check_gpu_memory
from rl_app_ppo.cli.main import main
from rl_app_ppo.config import rollout_engines
from rl_app_ppo.config.devices import plan_processes
from rl_app_ppo.config.loading import load_config, to_yaml
from rl_app_ppo.config.presets import NO_PRESET, of_demo, presets
from rl_protocol import ConfigError
from rl_rollout_vllm import VLLMUnavailableError

GOLDEN = Path(__file__).parents[1] / "golden"
MODELS = {
    "qwen2.5-0.5b": (
        494_032_768,
        Qwen2Config(
            vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
            num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=32768,
        ),
    ),
    "7b": (
        7_615_616_512,
        Qwen2Config(
            vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
            num_key_value_heads=4, tie_word_embeddings=False, max_position_embeddings=32768,
        ),
    ),
    "qwen3-8b": (
        8_190_735_360,
        Qwen3Config(
            vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
            num_key_value_heads=8, head_dim=128, tie_word_embeddings=False, max_position_embeddings=40960,
        ),
    ),
    "qwen3-30b-a3b": (
        30_532_122_624,
        Qwen3MoeConfig(
            vocab_size=151936, hidden_size=2048, moe_intermediate_size=768, num_hidden_layers=48, num_attention_heads=32,
            num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
            tie_word_embeddings=False, max_position_embeddings=40960,
        ),
    ),
}  # fmt: skip
"""Part of a preset's name -> the published number of weights, and the architecture."""
PROCESSES = {
    "gsm8k-qwen2.5-0.5b-1gpu": ["actor+ref+rollout: 1 GPU", "reward: CPU"],
    "math-qwen2.5-7b-8gpu": ["8 x actor+ref: 1 GPU", "8 x rollout: 1 GPU of the actor", "reward: CPU"],
    "dapo-qwen3-8b-8gpu": ["4 x actor: 1 GPU", "4 x rollout: 1 GPU", "reward: CPU"],
    "megatron-lora-qwen3-8b-8gpu": ["4 x actor: 1 GPU", "4 x rollout: 1 GPU", "reward: CPU"],
    "megatron-lora-qwen3-30b-a3b-16gpu": [
        "host 1: 8 x actor: 1 GPU",
        "host 2: 4 x rollout: 2 GPUs",
        "host 1: reward: CPU",
    ],
    "async-7b-2x8gpu": ["host 1: 8 x actor+ref: 1 GPU", "host 2: 8 x rollout: 1 GPU", "host 1: reward: CPU"],
}
"""Preset -> the processes of its plan."""


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch):
    def missing():
        raise VLLMUnavailableError("vLLM is not installed")

    monkeypatch.setattr(rollout_engines, "require_vllm", missing)


def model_of(preset, folder):
    """The weights and the folder of a preset's model: its config.json alone."""
    (weights, config), *others = [model for name, model in MODELS.items() if name in preset]
    assert not others
    config.save_pretrained(folder)
    return weights, folder


def test_each_preset_is_planned_here():
    assert sorted(PROCESSES) == sorted(name for name in presets() if name != NO_PRESET and not of_demo(name))


@pytest.mark.parametrize("preset", PROCESSES)
def test_a_preset_resolves_to_the_committed_configuration_and_says_what_was_not_run(preset):
    """To accept a change, run `just golden`."""
    assert to_yaml(load_config([f"preset={preset}"])) == (GOLDEN / f"{preset}.yaml").read_text()
    assert presets()[preset].endswith("tests resolve and plan it, no GPU has run it yet")


@pytest.mark.parametrize("preset", PROCESSES)
def test_a_preset_with_vllm_has_time_to_start_it_also_where_it_is_planned_without_vllm(preset):
    config = load_config([f"preset={preset}"])
    assert config.rollout.name == "hf" or config.ray.start_timeout_s == 1800


@pytest.mark.parametrize("preset", [name for name in PROCESSES if "megatron" not in name])
def test_a_stage_of_a_preset_has_time_for_an_update_with_the_longest_responses(preset):
    """At 30 % of the 989 teraFLOP/s of an H100, and half as long again."""
    config = load_config([f"preset={preset}"])
    (weights, _), *_ = [model for name, model in MODELS.items() if name in preset]
    rows, longest = (
        config.data.train_batch_size * config.rollout.n,
        config.data.max_prompt_length + config.rollout.response_length,
    )
    per_token = 8 * weights  # forward, again for the backward pass, and twice as much for that
    seconds = rows * longest * per_token / config.ranks / (0.3 * 989e12)
    assert config.trainer.stage_timeout_s > 1.5 * seconds


@pytest.mark.parametrize("preset", PROCESSES)
def test_the_plan_of_a_preset_fits_the_gpus_it_names(preset, tmp_path, capsys):
    weights, folder = model_of(preset, tmp_path)
    assert main(["--plan", f"preset={preset}", f"model.path={folder}"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"model: {weights:,} weights")
    heads = [
        line.split(", ") for line in text.splitlines()[2:] if re.match(r"(host \d: )?(\d+ x )?[a-z+]+: (CPU|\d)", line)
    ]
    assert [head[0] for head in heads] == PROCESSES[preset]
    room = int(re.search(r"GPUs? of (\d+) GiB", presets()[preset])[1])
    for place, _, needed in heads:
        if place.endswith("GPU"):
            number, unit = needed.split()
            assert unit == "GiB"
            assert float(number) < 0.9 * room, "CUDA and fragments need some"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json"]


def test_a_base_of_adapters_is_in_bfloat16_alone_and_adapters_are_counted_as_such(tmp_path, capsys):
    weights, folder = model_of("qwen3-8b", tmp_path)
    assert main(["--plan", "preset=megatron-lora-qwen3-8b-8gpu", f"model.path={folder}"]) == 0
    text = capsys.readouterr().out
    sizes = 4096, 32 * 128, 8 * 128, 12288  # hidden, queries, keys, inner
    pairs = (0, 1), (0, 2), (0, 2), (1, 0), (0, 3), (0, 3), (3, 0)
    adapters = 36 * 32 * sum(sizes[a] + sizes[b] for a, b in pairs)
    assert f"{adapters:,} of an actor trained" in text
    weight_bytes, gradients, optimizer = (n / 2 for n in (2 * weights + 4 * adapters, 4 * adapters, 8 * adapters))
    assert f"actor: weights {weight_bytes / 2**30:.1f} GiB, gradients {gradients / 2**20:.1f} MiB" in text
    assert f"optimizer {optimizer / 2**20:.1f} MiB" in text


def test_own_data_and_sizes_override_a_preset():
    config = load_config(["preset=dapo-qwen3-8b-8gpu", "data.train_files=mine.jsonl", "rollout.n=4"])
    assert (config.data.train_files, config.rollout.n, config.actor.clip_ratio_high) == (("mine.jsonl",), 4, 0.28)


def test_a_plan_without_the_config_of_the_model_says_how_to_get_it(tmp_path, monkeypatch, capsys):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert main(["--plan", "preset=math-qwen2.5-7b-8gpu"]) == 2
    assert "run `uv run hf download Qwen/Qwen2.5-7B-Instruct config.json` first" in capsys.readouterr().err
    assert main(["--plan", "preset=math-qwen2.5-7b-8gpu", f"model.path={tmp_path}"]) == 2
    assert "has no config.json to plan with" in capsys.readouterr().err


def test_a_plan_names_gpus_that_stand_idle(tmp_path, capsys):
    _, folder = model_of("qwen2.5-0.5b", tmp_path)
    one = ["preset=gsm8k-qwen2.5-0.5b-1gpu", f"model.path={folder}", "rollout.device=cpu", "rollout.dtype=float32"]
    assert main(["--plan", *one, "torch.device=cpu", "torch.param_dtype=float32"]) == 0
    assert (
        "warning: the models train on the CPU (model_engine=torch) while 1 GPU of this node stands idle"
        in capsys.readouterr().out
    )


def test_a_model_on_a_gpu_is_compared_with_the_memory_of_the_gpu_and_not_of_the_host(tmp_path):
    weights, folder = model_of("qwen2.5-0.5b", tmp_path)
    config = load_config(["preset=gsm8k-qwen2.5-0.5b-1gpu", f"model.path={folder}"])
    planned = plan_processes(config, 1)
    lasting = (6 + 4 + 8) * weights + 2 * weights + 2 * weights  # actor (float32 and bfloat16), ref and rollout
    check_gpu_memory(folder, config, planned, lasting)
    with pytest.raises(
        ConfigError, match=r"Process actor_ref_rollout needs 10\.\d GiB of GPU memory .*actor weights 2\.8 GiB"
    ):
        check_gpu_memory(folder, config, planned, lasting - 2**20)
    check_memory(weights, weights, config, 2 * 2**30, {"actor", "ref", "rollout"})
    with pytest.raises(ConfigError, match=r"actor 8\.3 GiB, .*ref 942\.\d MiB"):
        check_memory(weights, weights, config, 2 * 2**30)


def test_a_replica_and_the_models_whose_gpu_it_uses_fit_beside_each_other(tmp_path):
    """Of each weight, a rank of 8 holds 4 + 4 + 8 bytes for the actor and 2 for the reference."""
    weights, folder = model_of("7b", tmp_path)
    preset = ["preset=math-qwen2.5-7b-8gpu", f"model.path={folder}"]
    config, held = load_config(preset), (16 + 2) * weights / 8
    planned = plan_processes(config, 8)
    check_gpu_memory(folder, config, planned, int(2 * held * 1.001))
    with pytest.raises(
        ConfigError,
        match=r"rollout-0 takes rollout\.gpu_memory_utilization=0\.5 of each GPU of actor_ref, and actor_ref holds 16\.0 GiB of 31\.\d GiB "
        r".* Lower it to at most 0\.49, set fsdp\.optimizer_offload=true, or raise",
    ):
        check_gpu_memory(folder, config, planned, int(2 * held * 0.999))
    less = load_config([*preset, "rollout.gpu_memory_utilization=0.49"])
    check_gpu_memory(folder, less, planned, int(2 * held * 0.999))
    more = ["fsdp.optimizer_offload=true", "rollout.gpu_memory_utilization=0.7"]
    offloaded, room = load_config([*preset, *more]), (4 + 2) * weights / 8 / 0.3
    check_gpu_memory(folder, offloaded, planned, int(room * 1.001))
    with pytest.raises(ConfigError, match=r"actor_ref holds 5\.3 GiB .* Lower it to at most 0\.69, or raise"):
        check_gpu_memory(folder, offloaded, planned, int(room * 0.999))


def test_weights_that_fsdp_keeps_in_host_memory_take_none_of_the_gpu(tmp_path, capsys):
    weights, folder = model_of("7b", tmp_path)
    preset, offload = ["preset=math-qwen2.5-7b-8gpu", f"model.path={folder}"], "fsdp.cpu_offload=true"
    planned = plan_processes(load_config(preset), 8)
    with pytest.raises(ConfigError, match=r"actor_ref needs 16\.0 GiB of GPU memory before any activation"):
        check_gpu_memory(folder, load_config(preset), planned, 2 * weights)
    check_gpu_memory(folder, load_config([*preset, offload]), planned, 2 * weights)
    assert main(["--plan", *preset, offload]) == 0
    said = capsys.readouterr().out
    assert "8 x actor+ref: 1 GPU, 0 CPUs reserved, 17.5 GiB, and 16.0 GiB of host memory\n  actor: gathered" in said
