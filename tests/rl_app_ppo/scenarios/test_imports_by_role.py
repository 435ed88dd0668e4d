"""Each process of a run imports only what its role uses, since imports delay the start."""

from __future__ import annotations

import subprocess
import sys

import pytest

MODELS = {"torch", "transformers", "tensordict", "safetensors", "peft", "accelerate", "vllm"}
TABLES = {"pandas", "pyarrow", "datasets", "scipy", "sympy", "matplotlib", "PIL", "aiohttp", "fastapi"}
TRACKERS = {"tensorboard", "tensorboardX", "wandb", "mlflow", "trackio"}

DRIVER = """
from rl_app_ppo.api.training import run_training
from rl_app_ppo.checks.facts import Facts
from rl_app_ppo.checks.registry import preflight
from rl_app_ppo.config.loading import load_config
from rl_app_ppo.inputs.demo_model import cached_demo_model
from rl_ckpt_engine import load_policy

config = load_config([])
preflight(Facts(config, load_policy()))
cached_demo_model(config)
"""
REWARD = """
import asyncio
from pathlib import Path
from rl_app_ppo.config.loading import load_config
from rl_app_ppo.worker import build, process
from rl_app_ppo.worker.rewards import open_scorer

asyncio.run(open_scorer(load_config([]).reward, Path()))
"""
FORBIDDEN = {
    "driver": (DRIVER, MODELS | TABLES | TRACKERS),
    "reward": (REWARD, MODELS | TABLES | TRACKERS | {"ray"}),
    "plane": (
        "from rl_transferqueue.launch import server_process",
        MODELS | TABLES | TRACKERS | {"ray", "rich", "omegaconf", "rl_trainer", "rl_ckpt_engine", "rl_app_ppo"},
    ),
}


@pytest.mark.parametrize("role", FORBIDDEN)
def test_a_process_does_not_import_what_its_role_does_not_use(role: str):
    code, forbidden = FORBIDDEN[role]
    code = f"{code}\nimport sys\nprint(sorted(set({sorted(forbidden)}) & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"
