"""The engine of examples/weight_engine.py passes the conformance suite."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl_ckpt_engine import CheckpointEngine, CheckpointEngineConfig
from rl_ckpt_engine.testing import EngineConformance
from rl_protocol import ConfigError

EXAMPLE = Path(__file__).resolve().parents[3] / "packages" / "rl-ckpt-engine" / "examples" / "weight_engine.py"


def load_engine() -> type[CheckpointEngine]:
    spec = importlib.util.spec_from_file_location("weight_engine", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FileEngine


class TestFileEngine(EngineConformance):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.config = CheckpointEngineConfig(directory=str(tmp_path))

    def make_engine(self) -> CheckpointEngine:
        return load_engine().create(self.config)


def test_the_guide_tests_it_so(readme_code: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {"__name__": "guide"}
    exec(compile(readme_code("docs/guides", 1, "weight_engine.md"), "weight_engine.md", "exec"), space)
    space["TestFileEngine"]().test_odd_shapes_arrive()


def test_it_names_the_key_that_it_needs():
    with pytest.raises(ConfigError, match=r"checkpoint_engine\.directory"):
        load_engine().create(CheckpointEngineConfig())
