"""Tiny models of the three families, and results of Megatron-Core on them from subprocesses."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
from shared_folders import made_once

PROGRAM = Path(__file__).with_name("megatron_program.py")
NOISE = [  # Megatron-Core 0.16: missing Transformer Engine and Apex, deprecated torch calls
    "ignore:.*not installed",
    "ignore:.*deprecated",
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
]


def pytest_itemcollected(item):
    for noise in NOISE if "backend" in item.path.parts or "scenarios" in item.path.parts else ():
        item.add_marker(pytest.mark.filterwarnings(noise))


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folder with a model per family over 15 tokens; `even` and `tied` have 16."""
    root = write_models(tmp_path_factory.mktemp("models"), vocab=15)
    return write_models(root, vocab=16, even="qwen3", tied="qwen2")


@pytest.fixture(scope="session")
def even_models(tmp_path_factory):
    """Folder with a model per family over 16 tokens, an even number."""
    return write_models(tmp_path_factory.mktemp("even_models"), vocab=16)


def write_models(root, vocab, **only):
    """Write a model per family, or only those in `only`, whose norms and biases are random."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    classes = {
        "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": False}),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 12, "tie_word_embeddings": False}),
    }
    for seed, (name, family) in enumerate((only or dict(zip(classes, classes, strict=True))).items()):
        config, model, more = classes[family]
        torch.manual_seed(seed)
        made = model(
            config(
                vocab_size=vocab,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=64,
                initializer_range=0.3,
                pad_token_id=0,
                eos_token_id=1,
                bos_token_id=None,
                **more,
            )
        )
        with torch.no_grad():
            for parameter in made.parameters():
                if parameter.ndim == 1:
                    parameter += 0.2 * torch.randn(parameter.shape)
        made.save_pretrained(root / name)
    return root


def run_program(models, out, cases, *worlds):
    """Run these cases of the program in these worlds and wait; show its log if it fails."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "log").open("w") as log:
        done = subprocess.run(
            [sys.executable, str(PROGRAM), str(models), str(out), cases, *worlds],
            stdout=log,
            stderr=log,
            timeout=800,
            check=False,
        )
    assert done.returncode == 0, (out / "log").read_text()[-4000:]


@pytest.fixture(scope="session")
def runs(models, tmp_path_factory):
    """Folder with the results of one rank, of two in five layouts, and of four as TP2 with PP2."""

    def make(out):
        run_program(models, out, "some", "one", "two", "grid")

    return made_once(tmp_path_factory, "megatron_runs", make)


@pytest.fixture(scope="session")
def more_runs(models, tmp_path_factory):
    """Folder with the other cases, and all cases of four ranks in other layouts; nightly."""

    def make(out):
        run_program(models, out, "rest", "one", "two", "grid")
        run_program(models, out, "all", "four")

    return made_once(tmp_path_factory, "more_megatron_runs", make)


@pytest.fixture(scope="session")
def program():
    """The program as a module, for its batches."""
    spec = importlib.util.spec_from_file_location("megatron_program", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def open_rank():
    """A context manager that opens a process group of one rank."""
    import torch.distributed as dist

    from rl_megatron_peft import Layout

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # import warnings of Megatron-Core and its dependencies
        import rl_megatron_peft.backend.resume  # noqa: F401
        from rl_megatron_peft.backend.parallel import close_ranks, open_ranks

    @contextmanager
    def made():
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("GLOO_SOCKET_IFNAME", "lo")
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            yield open_ranks(Layout())
            close_ranks()
            dist.destroy_process_group()

    return made


@pytest.fixture(scope="module")
def ranks(open_rank):
    """A single rank."""
    with open_rank() as made:
        yield made


@pytest.fixture
def policy(ranks, models, program):
    """A policy with fused adapters on one rank."""
    return program.policy_of(models / "llama", ranks, "fused")
