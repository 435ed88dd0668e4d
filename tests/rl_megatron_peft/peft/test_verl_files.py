"""Rank and modules of verl's old adapter checkpoints, read without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from verl_adapters import RANK, legacy_files

from rl_megatron_peft import AdapterError, ModelShape, verl_adapter_options

FC2 = "decoder.layers.0.mlp.linear_fc2.adapter"
FC1 = "decoder.layers.0.mlp.linear_fc1.adapter"


def write(folder: Path, state: dict[str, object], file: str = "mp_rank_00_adapter.pt") -> Path:
    folder.mkdir(exist_ok=True)
    torch.save({"adapter_state_dict": state}, folder / file)
    return folder


def factors(module: str, rank: int) -> dict[str, torch.Tensor]:
    return {f"{module}.linear_in.weight": torch.zeros(rank, 300), f"{module}.linear_out.weight": torch.zeros(8, rank)}


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_rank_and_modules_of_every_layout(models: Path, tmp_path: Path, tensor: int, pipeline: int):
    source = legacy_files(tmp_path, ModelShape.read(models / "llama"), tensor=tensor, pipeline=pipeline)
    every = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    for path in (source, source / "adapter_checkpoint"):
        found = verl_adapter_options(path)
        assert (found.rank, found.target_modules) == (RANK, every)


def test_parameters_of_any_type_and_part_of_the_modules(tmp_path: Path):
    """The names tell the modules, whatever else a pickle stores of a tensor."""
    state = {name: torch.nn.Parameter(value.bfloat16()) for name, value in factors(f"module.{FC2}", 6).items()}
    found = verl_adapter_options(write(tmp_path, state))
    assert (found.rank, found.target_modules) == (6, ("down_proj",))


class Danger:
    """Creates a folder if it is unpickled without restrictions."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self._path),)


@pytest.mark.parametrize(
    ("state", "field", "words"),
    [
        ({}, "adapter_state_dict", "is missing or empty"),
        (factors("decoder.layers.0.mlp.experts.linear_fc1.adapter", 4), None, "not a factor of a LoRA adapter"),
        ({f"{FC2}.linear_in.weight": torch.zeros(3)}, f"{FC2}.linear_in.weight", "is not a matrix"),
        (factors(FC1, 4) | factors(FC2, 8), "rank", r"must be the same in all modules; got \[4, 8\]"),
    ],
)
def test_what_is_no_adapter_of_one_rank_is_refused(tmp_path: Path, state: dict, field: str | None, words: str):
    with pytest.raises(AdapterError, match=words) as caught:
        verl_adapter_options(write(tmp_path, state))
    assert field in (None, caught.value.field)


def test_a_file_runs_nothing_and_a_damaged_one_is_named(tmp_path: Path):
    folder = write(tmp_path, {FC1: Danger(tmp_path / "run")})
    with pytest.raises(AdapterError, match="is missing or empty"):
        verl_adapter_options(folder)
    assert not (tmp_path / "run").exists()
    for content in (b"", b"PK\x03\x04no", b"\x80\x02}q\x00."):
        (folder / "mp_rank_00_adapter.pt").write_bytes(content)
        with pytest.raises(AdapterError, match="can't be read as tensors") as caught:
            verl_adapter_options(folder)
        assert caught.value.field == "file"
    with pytest.raises(AdapterError, match=r"holds no mp_rank_\*_adapter\.pt"):
        verl_adapter_options(tmp_path / "nowhere")


def test_it_needs_no_torch(tmp_path: Path):
    folder = write(tmp_path, factors(FC1, 4))
    text = f"import sys, pathlib, rl_megatron_peft as r; r.verl_adapter_options(pathlib.Path({str(folder)!r})); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "False\n"
