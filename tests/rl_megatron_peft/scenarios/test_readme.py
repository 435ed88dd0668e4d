"""The README's Python blocks run as written, on a single rank with tiny models."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from rl_megatron_peft import Adapter, LoraConfig, LoraPair, read_adapter, whole_checkpoints, write_adapter
from rl_protocol import WeightTensor


def run(code, **space):
    exec(compile(code, "README.md", "exec"), space)
    return space


def test_adapter_folder(readme_code, tmp_path, monkeypatch):
    def zeros(*shape):
        return WeightTensor("any", "float32", shape, np.zeros(4 * shape[0] * shape[1], np.uint8))

    pairs = {"model.layers.0.self_attn.q_proj": LoraPair(a=zeros(2, 4), b=zeros(6, 2))}
    config = LoraConfig(rank=2, alpha=4, target_modules=("q_proj",))
    monkeypatch.chdir(tmp_path)
    write_adapter(tmp_path / "run" / "adapter", Adapter(base_model="some/model", config=config, pairs=pairs))
    run(readme_code("packages/rl-megatron-peft", 0))
    assert read_adapter(tmp_path / "run" / "copy").config == config


@pytest.fixture
def in_folder(tmp_path, models, ranks, monkeypatch):
    """A working folder with the model that the README names; `open_ranks` returns the open rank."""
    import rl_megatron_peft.backend.parallel as parallel

    monkeypatch.chdir(tmp_path)
    shutil.copytree(models / "qwen3", tmp_path / "path" / "of" / "qwen3")
    monkeypatch.setattr(parallel, "open_ranks", lambda layout: ranks)
    return tmp_path


def test_a_policy(readme_code, in_folder, program):
    batch = program.batch_of(4, 0)
    run(readme_code("packages/rl-megatron-peft", 1), batch=batch, loss=program.loss)
    assert read_adapter(in_folder / "run" / "adapter").config.rank == 8
    assert [path.name for path in whole_checkpoints(in_folder / "run")] == ["step-1"]


def test_a_critic(readme_code, in_folder, program, ranks):
    def value_loss(values, micro, counts):
        return (values**2).sum() / max(counts.tokens, 1), {}

    batch = program.batch_of(4, 0)
    run(readme_code("packages/rl-megatron-peft", 2), batch=batch, value_loss=value_loss, ranks=ranks)
    assert (in_folder / "run" / "critic" / "config.json").is_file()
    assert (in_folder / "run" / "critic-1").is_dir()
