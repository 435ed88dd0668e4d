"""The environment of vLLM's processes, and the arguments of its engine."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rl_protocol import ConfigError
from rl_rollout_vllm.availability import VLLMCapabilities
from rl_rollout_vllm.config import CPU_KV_CACHE, VLLMConfig, environment
from rl_rollout_vllm.engine.launch import engine_arguments
from rl_rollout_vllm.weights.checkpoint import Checkpoint, Vision

RSS_AFTER = """
import numpy, psutil
before = psutil.Process().memory_info().rss
numpy.ones(64 << 20, numpy.uint8)
print((psutil.Process().memory_info().rss - before) >> 20)
"""


KEEPS = {"MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_"}


def test_memory_that_is_freed_stays_with_a_process_in_this_environment():
    """An update prepacks all weights into new memory; page faults would take half of its time."""
    cpu = environment(VLLMConfig(model_path="m"), "cpu")
    ours = {name: value for name, value in os.environ.items() if name not in KEEPS}
    left = [
        subprocess.run([sys.executable, "-c", RSS_AFTER], env=ours | more, capture_output=True, check=True)
        for more in ({}, {name: cpu[name] for name in KEEPS})
    ]
    usual, here = (int(done.stdout) for done in left)
    assert usual < 8
    assert here >= 60


def test_the_environment_is_said_and_not_set():
    cpu = environment(VLLMConfig(model_path="m", threads=3), "cpu")
    assert cpu["OMP_NUM_THREADS"] == "3"
    assert cpu["TORCHDYNAMO_DISABLE"] == "1"
    assert cpu.keys() >= KEEPS
    assert "TORCHDYNAMO_DISABLE" not in environment(VLLMConfig(model_path="m", enforce_eager=False), "cpu")
    assert "VLLM_CPU_OMP_THREADS_BIND" not in environment(VLLMConfig(model_path="m"), "cuda")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_vllm_waits_for_its_process_as_long_as_a_start_may_take(device):
    settings = VLLMConfig(model_path="m", start_timeout_s=1800.5)
    assert environment(settings, device)["VLLM_ENGINE_READY_TIMEOUT_S"] == "1801"


MODEL = Checkpoint(path=Path("m"), context=64, vocabulary=9, eos_ids=(1,), head_size=8, tied=False, shapes={})


def capabilities(device):
    return VLLMCapabilities(
        distribution="vllm",
        version="0",
        device=device,
        sleep_frees_memory=False,
        sleep_levels=(1,),
        load_weights_in_place=False,
        reload_needs_tied_head=False,
        reload_keeps_prefix_cache=False,
        reload_drops_adapters=False,
        chunked_prefill_with_seeds=True,
    )


@pytest.mark.parametrize(
    ("device", "settings", "memory"),
    [
        ("cpu", {}, {"kv_cache_memory_bytes": CPU_KV_CACHE}),
        ("cpu", {"kv_cache_bytes": 9}, {"kv_cache_memory_bytes": 9}),
        ("cuda", {}, {"gpu_memory_utilization": 0.9}),
        ("cuda", {"gpu_memory_utilization": 0.4}, {"gpu_memory_utilization": 0.4}),
        (
            "cuda",
            {"gpu_memory_utilization": 0.4, "kv_cache_bytes": 9},
            {"gpu_memory_utilization": 0.4, "kv_cache_memory_bytes": 9},  # vLLM starts only if so much is free
        ),
    ],
)
def test_the_memory_of_keys_and_values_is_a_part_of_the_gpu_unless_it_is_given(device, settings, memory):
    found = engine_arguments(VLLMConfig(model_path="m", **settings), MODEL, capabilities(device))
    keys = ("kv_cache_memory_bytes", "gpu_memory_utilization")
    assert {key: found[key] for key in keys if key in found} == memory


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_vllm_takes_the_trainers_patches_as_they_are(device):
    sighted = replace(MODEL, vision=Vision(token=3, patches=4, never_generated=(3, 8)))
    found = engine_arguments(VLLMConfig(model_path="m"), sighted, capabilities(device))
    assert (found["mm_device_do_normalize"], found["skip_tokenizer_init"]) == (False, False)
    assert found["skip_mm_profiling"] == (device == "cpu")  # on a GPU it finds the memory that is left
    assert "mm_device_do_normalize" not in engine_arguments(VLLMConfig(model_path="m"), MODEL, capabilities(device))


def test_processes_of_an_engine_are_its_own_also_in_a_placement_group_of_ray():
    for size, backend in ((1, "uni"), (2, "mp")):
        settings = VLLMConfig(model_path="m", tensor_parallel_size=size)
        assert engine_arguments(settings, MODEL, capabilities("cuda"))["distributed_executor_backend"] == backend


@pytest.mark.parametrize("part", [0.0, 1.5])
def test_a_part_of_the_memory_that_is_none_is_refused(part):
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization must be in \(0, 1\]; got"):
        VLLMConfig(model_path="m", gpu_memory_utilization=part)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"dtype": "auto"}, "dtype must be one of float32, bfloat16, float16; got 'auto'"),
        ({"logprobs_mode": "raw"}, "logprobs_mode must be one of raw_logprobs, processed_logprobs; got 'raw'"),
    ],
)
def test_a_setting_with_other_values_is_refused_before_vllm_starts(setting, message):
    with pytest.raises(ConfigError, match=message):
        VLLMConfig(model_path="m", **setting)
