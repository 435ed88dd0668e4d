"""The example plug-in, installed as a user does, carries the weights of a real run.

If it is changed or not allowed, the run is refused before a process starts.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "rl_ckpt_engine" / "example_plugin"
CUSTOM = [
    f"checkpoint_engine.{key}=example" for key in ("backend", "custom_backend_module", "checkpoint_manager_class")
]


@pytest.fixture
def site(tmp_path, monkeypatch) -> Path:
    """A folder with the example installed, on the import path of the run's processes."""
    folder = tmp_path / "site"
    program = [shutil.which("uv")] if shutil.which("uv") else [sys.executable, "-m", "uv"]
    shutil.copytree(EXAMPLE, tmp_path / "example")
    subprocess.run(
        [*program, "pip", "install", "--no-deps", "--target", str(folder), str(tmp_path / "example")],
        check=True,
        capture_output=True,
        timeout=300,
    )
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.delenv("RL_PLUGINS", raising=False)
    return folder


def allow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pin what is installed now, as an operator does."""
    printed = subprocess.run(
        [sys.executable, "-m", "rl_protocol.support.plugins", "rl_ckpt_engine"],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    ).stdout
    assert printed.count('distribution = "ckpt-example-plugin"') == printed.count("sha256 = ") == 2
    file = tmp_path / "plugins.toml"
    file.write_text(printed)
    monkeypatch.setenv("RL_PLUGINS", str(file))


@pytest.mark.slow
def test_the_example_trains_the_app_and_is_refused_when_changed(app, site, tmp_path, monkeypatch):
    def refused() -> str:
        done = app(*CUSTOM, "trainer.run_name=refused", timeout=500)
        assert done.code == 2, (done.out, done.err)
        assert done.err.startswith("error: ")
        assert done.err.count("\n") == 1
        assert not (tmp_path / "refused").exists()
        return done.err

    assert "is installed but not allowed" in refused()

    allow(tmp_path, monkeypatch)
    done = app(*CUSTOM, "actor.optim.lr=1e-3", "rollout.num_workers=2")
    assert done.code == 0, done.err
    trained = done.metrics[1:]
    assert [m["weight_sync/version"] for m in trained] == [1, 2]
    assert [m["weight_sync/receivers"] for m in trained] == [2, 2]
    assert max(m["training/rollout_log_probs_diff_max"] for m in trained) < 1e-4
    assert [m["weight_sync/example_versions"] for m in trained] == [1, 2], "the manager on the driver"
    for process, did in (("actor", "sends"), ("rollout-0", "receives"), ("rollout-1", "receives")):
        log = (done.folder / "logs" / f"{process}.log").read_text()
        assert [f"example engine {did} version {v}" in log for v in (1, 2)] == [True, True], process

    module = site / "ckpt_example_plugin" / "__init__.py"
    source = module.read_text()
    module.write_text(source.replace("Shared memory", "shared memory", 1))
    assert "was changed on disk" in refused()

    module.write_text(source.replace("API_VERSION: ClassVar[int] = 1", "API_VERSION: ClassVar[int] = 2"))
    allow(tmp_path, monkeypatch)
    assert "was written for API version 2; this is version 1" in refused()
