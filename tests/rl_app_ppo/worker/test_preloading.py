from __future__ import annotations

import subprocess
import sys

import pytest

from rl_app_ppo.config.loading import load_config
from rl_app_ppo.worker.preloading import worker_modules


@pytest.mark.slow
def test_workers_find_the_models_imported_and_ray_not_loaded():
    imports = ", ".join(worker_modules(load_config([])))
    code = (
        f"import sys, {imports}; print(sorted({{'ray', 'torch', 'transformers.modeling_utils'}} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout == "['torch', 'transformers.modeling_utils']\n"


def test_other_engines_are_not_imported_in_advance():
    modules = worker_modules(load_config(["model_engine=megatron", "rollout.name=vllm"]))
    assert not [name for name in modules if name.startswith(("transformers", "rl_trainer"))]
