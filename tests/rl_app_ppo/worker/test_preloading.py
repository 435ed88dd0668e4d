from __future__ import annotations

import subprocess
import sys

import pytest

from rl_app_ppo.config.loading import load_config
from rl_app_ppo.worker.preloading import worker_modules


@pytest.mark.slow
def test_workers_find_the_models_imported_and_neither_ray_nor_tensordict_loaded():
    imports = ", ".join(worker_modules(load_config([])))
    looked_for = {"ray", "tensordict", "torch", "transformers.modeling_utils"}
    code = f"import sys, {imports}; print(sorted({looked_for} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout == "['torch', 'transformers.modeling_utils']\n"


@pytest.mark.slow
def test_what_is_imported_for_workers_does_not_start_cuda():
    """A process forked from one that has asked CUDA for its GPUs can't use them."""
    modules = worker_modules(load_config(["model_engine=fsdp"]))
    code = f"""
import sys, torch
asked = []
def look(frame, event, function):
    if event == "c_call" and function is torch._C._cuda_getDeviceCount:
        asked.append(frame)
sys.setprofile(look)
import {", ".join(modules)}
sys.setprofile(None)
print(asked, torch.cuda.is_initialized())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout == "[] False\n"


def test_other_engines_are_not_imported_in_advance():
    modules = worker_modules(load_config(["model_engine=megatron", "rollout.name=vllm"]))
    assert not [name for name in modules if name.startswith(("transformers", "rl_trainer"))]
