"""Megatron-Bridge's weight mapping equals ours, and has the functions that we call."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

pytestmark = pytest.mark.bridge
HERE = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def compared(even_models, tmp_path_factory):
    """(layout, family) -> the comparisons of each rank."""
    out = tmp_path_factory.mktemp("compared")
    with (out / "log").open("w") as log:
        command = [sys.executable, str(HERE / "bridge_program.py"), str(even_models), str(out)]
        done = subprocess.run(command, stdout=log, stderr=log, timeout=280, check=False)
    assert done.returncode == 0, (out / "log").read_text()[-4000:]

    def read(layout, family):
        return [json.loads(file.read_text()) for file in sorted(out.glob(f"{layout}-{family}-*.json"))]

    return read


@pytest.mark.parametrize(("layout", "ranks"), [("one", 1), ("tp2", 2), ("pp2", 2)])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_both_mappings_agree_bit_for_bit_in_both_directions(compared, family, layout, ranks):
    found = compared(layout, family)
    assert len(found) == ranks
    for rank in found:
        assert rank == dict.fromkeys(["best", "loaded", "unchanged", "fresh", "names", "trained"], True)


@pytest.mark.filterwarnings("ignore")  # import warnings of Megatron-Bridge and its dependencies
def test_the_installed_version_is_what_the_table_says():
    from rl_megatron_peft.backend.model.megatron_bridge import CAPABILITIES

    major, minor, *_ = metadata.version("megatron-bridge").split(".")
    known = CAPABILITIES[int(major), int(minor)]
    from megatron.bridge import AutoBridge
    from megatron.bridge.models.conversion.model_bridge import WeightConversionTask

    assert {name for name in known.uses | known.lacks if hasattr(AutoBridge, name)} == known.uses
    takes = {name: set(inspect.signature(getattr(AutoBridge, name)).parameters) for name in known.uses}
    assert {"model", "show_progress", "conversion_tasks", "merge_adapter_weights"} <= takes["export_hf_weights"]
    assert {"param_weight", "global_param_name"} <= set(WeightConversionTask.__dataclass_fields__)


@pytest.mark.filterwarnings("ignore")
def test_a_vocabulary_that_it_would_have_to_pad_is_left_to_our_mapping(models):
    from rl_megatron_peft import Layout, ModelShape
    from rl_megatron_peft.backend.model.megatron_bridge import bridge_problem

    shape = ModelShape.read(models / "llama")
    assert bridge_problem(shape, Layout()) == ""
    assert "can't divide a vocabulary of 15 over tensor=2 ranks" in bridge_problem(shape, Layout(tensor=2))


def test_the_edits_of_this_environment_are_made_once(tmp_path):
    from megatron.bridge.models.conversion import param_mapping

    file = Path(param_mapping.__file__)
    before = file.stat().st_mtime_ns, file.read_text()
    subprocess.run([sys.executable, str(HERE / "patch_bridge.py")], check=True, timeout=300)
    assert (file.stat().st_mtime_ns, file.read_text()) == before
