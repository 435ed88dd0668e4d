"""Compare the memory that --plan estimates for a role with the peak of a process that has it.

    uv run benchmarks/bench_memory.py [--sizes 27M,110M,0.5B] [--roles actor,critic,ref]
        [--engine fsdp] [--tokens 2048] [--no-publish] [--smoke]

Random Qwen2 models train for three steps in bfloat16 with activation checkpointing, or compute the
log-probs of a reference three times. Each role has a process of its own with the settings of the
app's workers. Its memory is the most that is resident during the last two steps, minus what was
resident before it made the model; `first_mib` is the same until the end of the first step, with
pages of the model's file, which the kernel can drop. An actor's tokens per second are compared with
those of a plain PyTorch loop that computes in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from harness.pairs import publish, verdict
from harness.results import ROOT
from transformers import Qwen2Config, Qwen2ForCausalLM

from rl_app_ppo.checks.model_size import model_size
from rl_app_ppo.checks.role_memory import role_bytes
from rl_app_ppo.cluster.environment import compute_settings
from rl_app_ppo.config.loading import load_config

SIZES = {
    "0.03M": (32, 64, 2, 2, 2, 32),
    "27M": (512, 1536, 8, 8, 8, 32),
    "110M": (768, 3072, 12, 12, 12, 32),
    "0.5B": (896, 4864, 24, 14, 2, 151936),
}
"""Hidden size, intermediate size, layers, heads, key-value heads, vocabulary."""
ROWS, ROLES = 8, ("actor", "critic", "ref")
RUNS = {"ref": 3}
WITHIN, AIM, AS_FAST = 0.15, 0.10, 0.95


def make_model(size: str, folder: Path) -> int:
    """Save a random model; returns its number of weights."""
    hidden, inner, layers, heads, kv_heads, vocabulary = SIZES[size]
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    return sum(weight.numel() for weight in model.parameters())


def settings_of(engine: str, tokens: int) -> list[str]:
    """The overrides of all roles: one rank, and one pass of so many tokens per update."""
    passes = [
        f"{of}.{key}" for of in ("actor", "critic") for key in (f"ppo_max_token_len={tokens}", "ppo_mini_batch_size=4")
    ]
    options = [f"{engine}.{key}" for key in ("device=cpu", "param_dtype=bfloat16", "activation_checkpointing=true")]
    rows = ["data.train_batch_size=4", f"rollout.n={ROWS // 4}"]
    return ["algorithm=ppo", f"model_engine={engine}", *rows, *options, *passes]


def measure(model: Path, role: str, tokens: int, settings: Sequence[str]) -> dict[str, float]:
    """What `harness.role_memory` finds in a process of its own."""
    command = [sys.executable, "-m", "harness.role_memory", str(model), role, str(tokens // ROWS), *settings]
    environment = {**os.environ, **compute_settings(os.cpu_count() or 1)}
    done = subprocess.run(
        command, cwd=ROOT / "benchmarks", env=environment, check=True, stdout=subprocess.PIPE, text=True, timeout=3600
    )
    return json.loads(done.stdout.splitlines()[-1])


def memory(model: Path, role: str, tokens: int, settings: Sequence[str]) -> dict[str, Any]:
    """`measure` of one process, of a reference the median and the range of several.

    Gloo's threads may release the gathered weights of a layer late, and a reference has little
    other memory.
    """
    runs = [measure(model, role, tokens, settings) for _ in range(RUNS.get(role, 1))]
    runs.sort(key=lambda run: run["later"])
    return {**runs[len(runs) // 2], "range": [run["later"] for run in runs]}


def compare(
    size: str, role: Any, tokens: int, model: Path, weights: int, settings: Sequence[str]
) -> list[dict[str, Any]]:
    """The estimate and the peak of a role, and whether they are near each other."""
    config = load_config(settings)
    parts = role_bytes(role, config, model_size(model, config.lora))
    found = memory(model, role, tokens, settings)
    error = abs(sum(parts.values()) / found["later"] - 1)
    row = {
        "memory_of": role,
        "model": size,
        "engine": config.model_engine,
        "weights": weights,
        "tokens": tokens,
        "measured_mib": _mib(found["later"]),
        "measured_range_mib": [_mib(found["range"][0]), _mib(found["range"][-1])],
        "first_mib": _mib(found["first"]),
        "estimated_mib": _mib(sum(parts.values())),
        "parts_mib": {name: _mib(part) for name, part in parts.items()},
        "tokens_per_s": round(tokens / found["seconds"], 1),
    }
    print(row, flush=True)
    question = f"|estimate / peak memory - 1|, {role}, {size}"
    rows = [row, verdict(question, error, WITHIN, AIM, at_least=False)]
    if role == "actor":
        bare = tokens / measure(model, "bare", tokens, settings)["seconds"]
        speed = tokens / found["seconds"] / bare
        question = f"tokens per second / those of a bare loop in bfloat16, {size}"
        rows.append(verdict(question, speed, None, AS_FAST, at_least=True, bare_tokens_per_s=round(bare, 1)))
    return rows


def _mib(size: float) -> float:
    return round(size / 2**20, 1)


def main() -> None:
    """Measure each role and size, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="27M,110M,0.5B")
    parser.add_argument("--roles", default=",".join(ROLES))
    parser.add_argument("--engine", choices=("torch", "fsdp"), default="fsdp", help="model_engine, of one rank")
    parser.add_argument("--tokens", type=int, default=2048, help="of an update")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, nothing written")
    parser.add_argument("--no-publish", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.sizes, arguments.roles, arguments.tokens = "0.03M", "actor", 128
    rows = list[dict[str, Any]]()
    for size in arguments.sizes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            weights = make_model(size, Path(folder))
            for role in arguments.roles.split(","):
                settings = settings_of(arguments.engine, arguments.tokens)
                rows += compare(size, role, arguments.tokens, Path(folder), weights, settings)
    if not (arguments.smoke or arguments.no_publish):
        name = "memory" if arguments.engine == "fsdp" else f"memory_{arguments.engine}"
        publish("_".join([name, *arguments.sizes.split(","), *arguments.roles.split(",")]), rows)


if __name__ == "__main__":
    main()
