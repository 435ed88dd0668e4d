"""Operations of a model against torch's own counter, and the metrics of an update on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from rl_app_ppo.config.loading import load_config
from rl_app_ppo.worker import update_meter
from rl_app_ppo.worker.update_meter import GpuMeter, TrainingFlops, meter_of, peak_flops

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MODELS = {
    "untied": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "wide heads": Qwen3Config(**SIZES, head_dim=16),
    "llama": LlamaConfig(**SIZES),
    "experts": Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=8),
}


def counted(config, lengths, *, frozen=False, head=True):
    """The operations that torch counts in a forward and a backward pass of each sequence; a few of
    them turn the angles of positions."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    model.requires_grad_(not frozen)
    with FlopCounterMode(display=False) as counter:
        for length in lengths:
            tokens = model.get_input_embeddings()(torch.arange(length)[None]).detach().requires_grad_()
            run = model if head else model.get_decoder()
            run(inputs_embeds=tokens, use_cache=False)[0].sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", MODELS)
def test_operations_are_those_that_torch_counts(tmp_path, name):
    lengths = np.array([5, 17, 2])
    MODELS[name].save_pretrained(tmp_path)
    flops = TrainingFlops.of(tmp_path, frozen=False).total(lengths)
    assert flops == pytest.approx(counted(MODELS[name], lengths), rel=0.01)


def test_a_critic_has_no_output_layer_and_frozen_weights_have_no_gradient(tmp_path):
    lengths = np.array([9, 30])
    MODELS["untied"].save_pretrained(tmp_path)
    critic = TrainingFlops.of(tmp_path, frozen=False, head=False)
    assert critic.total(lengths) == pytest.approx(counted(MODELS["untied"], lengths, head=False), rel=0.01)
    frozen = TrainingFlops.of(tmp_path, frozen=True)
    assert frozen.total(lengths) == pytest.approx(counted(MODELS["untied"], lengths, frozen=True), rel=0.01)


def test_the_peak_is_that_of_the_most_exact_name():
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("NVIDIA H20") == 148e12
    assert peak_flops("NVIDIA GH200 480GB") == 989e12
    assert peak_flops("NVIDIA L40S") == 362e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    for unknown in ("Tesla V100-SXM2-16GB", "NVIDIA RTX A4000", "NVIDIA RTX A1000", "NVIDIA A10G"):
        assert peak_flops(unknown) is None


class Device:
    """torch.cuda of a device with that name, on which an update takes two seconds."""

    def __init__(self, monkeypatch, name):
        self._clock = iter((10.0, 12.0))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 << 30)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 5 << 30)
        monkeypatch.setattr(update_meter.time, "perf_counter", lambda: next(self._clock))


def test_an_update_reports_utilization_and_memory(monkeypatch):
    Device(monkeypatch, "NVIDIA A100-SXM4-80GB")
    meter = GpuMeter("actor", TrainingFlops(token=1e12, pair=1e11), epochs=3, sharing=2)
    assert meter(lambda: {"actor/lr": 0.5}, np.array([10, 20])) == {
        "actor/lr": 0.5,
        "perf/mfu/actor": pytest.approx(3 / 2 * (30e12 + 50e12) / 2 / 312e12),
        "perf/max_memory_allocated_gb": 3.0,
        "perf/max_memory_reserved_gb": 5.0,
    }


def test_a_device_without_a_known_peak_reports_memory_alone(monkeypatch):
    Device(monkeypatch, "Tesla V100-SXM2-16GB")
    meter = GpuMeter("actor", TrainingFlops(token=1.0, pair=1.0), epochs=1)
    assert set(meter(dict, np.array([1]))) == {"perf/max_memory_allocated_gb", "perf/max_memory_reserved_gb"}


def test_a_role_is_measured_on_a_gpu_alone(monkeypatch, tmp_path):
    Device(monkeypatch, "NVIDIA H200")
    MODELS["untied"].save_pretrained(tmp_path)
    config = load_config(["algorithm=ppo", "critic.ppo_epochs=2", "lora.rank=4"])
    assert meter_of("actor", config, tmp_path, torch.device("cpu")) is None
    meters = [meter_of(role, config, tmp_path, torch.device("cuda")) for role in ("actor", "critic")]
    lengths = np.array([7, 11])
    whole, body = (TrainingFlops.of(tmp_path, frozen=f, head=f).total(lengths) for f in (True, False))
    actor, critic = meters
    assert actor(dict, lengths)["perf/mfu/actor"] == pytest.approx(whole / 2 / 989e12)
    Device(monkeypatch, "NVIDIA H200")
    assert critic(dict, lengths)["perf/mfu/critic"] == pytest.approx(2 * body / 2 / 989e12)
