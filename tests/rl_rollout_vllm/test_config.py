"""The environment of vLLM's processes."""

from __future__ import annotations

import os
import subprocess
import sys

from rl_rollout_vllm.config import VLLMConfig, environment

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
