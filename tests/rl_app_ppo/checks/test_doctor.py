"""What `rl doctor` says of this machine."""

from __future__ import annotations

import pytest

from rl_app_ppo.checks import doctor
from rl_app_ppo.checks.doctor import Finding, findings
from rl_app_ppo.config.loading import load_config
from rl_ckpt_engine import load_policy


def by_name(*words):
    return {found.what: found for found in findings(load_config(words), load_policy(allow_unsafe_plugins=False))}


def test_the_demo_can_start_here(tmp_path):
    found = by_name(f"trainer.output_dir={tmp_path / 'a' / 'b'}")
    assert found["configuration"] == Finding("configuration", "ok", "a run with these settings can start")
    assert found["disk"].level == "ok"
    assert str(tmp_path) in found["disk"].text
    assert found["torch"].text.startswith("2.")
    assert list(found)[:5] == ["Python", "torch", "GPUs", "Ray", "memory"]
    assert {"rollout.name=vllm", "model_engine=megatron", "trainer.logger=wandb"} <= found.keys()


def test_what_a_run_refuses_is_an_error_and_so_is_a_full_disk(tmp_path):
    found = by_name("rollout.response_length=64", "trainer.min_free_disk_mb=999999999")
    assert found["configuration"].level == "error"
    assert "rollout.response_length" in found["configuration"].text
    assert found["disk"].level == "error"
    assert "trainer.min_free_disk_mb=999999999" in found["disk"].text


def test_little_memory_is_a_warning_with_a_remedy(monkeypatch):
    monkeypatch.setattr(doctor, "available_bytes", lambda: 4 * 2**30 - 1)
    assert by_name()["memory"].level == "warning"
    monkeypatch.setattr(doctor, "available_bytes", lambda: 4 * 2**30)
    assert by_name()["memory"] == Finding("memory", "ok", "4.0 GiB free")


@pytest.mark.parametrize(("package", "text"), [("numpy", "numpy "), ("no-such-package", "pip install 'x[y]'")])
def test_a_missing_package_is_no_error_and_has_its_command(package, text):
    found = doctor._package("a=b", (package,), "y", "x[y]")
    assert found.level == "ok"
    assert text in found.text
