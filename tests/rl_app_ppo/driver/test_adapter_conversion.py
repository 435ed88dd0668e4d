"""An adapter in verl's old format becomes a PEFT folder in the folder of the run."""

from __future__ import annotations

import asyncio
import io
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from rich.console import Console
from safetensors.numpy import load_file
from verl_adapters import legacy_files, trained

from rl_app_ppo.config.loading import load_config
from rl_app_ppo.config.schema import AppConfig
from rl_app_ppo.driver.adapter_conversion import convert_adapter, initial_adapter
from rl_app_ppo.outputs.console import Screen
from rl_app_ppo.outputs.run_folder import RunFiles
from rl_app_ppo.outputs.startup_times import Startup
from rl_megatron_peft import ModelShape
from rl_protocol import ConfigError, WorkerError


@pytest.fixture
def startup() -> Iterator[Startup]:
    made = Startup(lambda line: None)
    yield made
    made.end()


@pytest.fixture
def old(base_model: Path, tmp_path: Path) -> Path:
    return legacy_files(tmp_path / "old", ModelShape.read(base_model), tensor=2, pipeline=2)


@pytest.fixture
def config(base_model: Path, old: Path) -> AppConfig:
    return load_config([f"model.path={base_model}", f"lora.adapter_path={old}", "lora.alpha=6"])


def converted(config: AppConfig, folder: Path, startup: Startup) -> str:
    """Convert; returns what the console shows."""
    out = io.StringIO()
    asyncio.run(convert_adapter(config, RunFiles(folder=folder), Screen(Console(file=out, width=400)), startup))
    return out.getvalue()


def test_it_is_the_adapter_of_all_ranks_and_is_written_once(
    config: AppConfig, base_model: Path, tmp_path: Path, startup: Startup
):
    text = converted(config, tmp_path, startup)
    folder = tmp_path / "adapter"
    assert f"converted from verl's old format into {folder}" in text
    assert initial_adapter(config, RunFiles(folder=tmp_path)) == str(folder)
    tensors, pairs = load_file(folder / "adapter_model.safetensors"), trained(ModelShape.read(base_model))
    assert len(tensors) == 2 * len(pairs)
    for module, factors in pairs.items():
        for side, factor in zip("AB", factors, strict=True):
            assert np.array_equal(tensors[f"base_model.model.{module}.lora_{side}.weight"], factor)
    fields = json.loads((folder / "adapter_config.json").read_text())
    assert (fields["lora_alpha"], fields["base_model_name_or_path"]) == (6.0, str(base_model))
    before = (folder / "adapter_config.json").stat().st_mtime_ns
    assert converted(config, tmp_path, startup) == ""  # a later attempt of the same run
    assert (folder / "adapter_config.json").stat().st_mtime_ns == before


def test_any_other_adapter_is_taken_as_it_is(config: AppConfig, tmp_path: Path, startup: Startup):
    files = RunFiles(folder=tmp_path / "run")
    for path in ("", str(tmp_path / "peft")):
        other = replace(config, lora=replace(config.lora, adapter_path=path))
        assert converted(other, files.folder, startup) == ""
        assert initial_adapter(other, files) == path
    assert not files.folder.exists()


def test_a_file_that_can_not_be_read_is_named(config: AppConfig, old: Path, tmp_path: Path, startup: Startup):
    (old / "adapter_checkpoint" / "mp_rank_01_001_adapter.pt").write_text("no")
    with pytest.raises(
        ConfigError, match=r"lora\.adapter_path=.*can't be converted: .*mp_rank_01_001_adapter\.pt: file"
    ):
        converted(config, tmp_path, startup)
    assert not (tmp_path / "adapter").exists()


def test_a_conversion_that_takes_too_long_is_ended(config: AppConfig, tmp_path: Path, startup: Startup):
    short = replace(config, ray=replace(config.ray, start_timeout_s=0.01))
    with pytest.raises(WorkerError, match=r"longer than ray\.start_timeout_s=0\.01"):
        converted(short, tmp_path, startup)
    commands = [child.cmdline() for child in psutil.Process(os.getpid()).children()]
    assert not [command for command in commands if "rl_megatron_peft" in command]
