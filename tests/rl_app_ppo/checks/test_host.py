"""What `rl doctor` says of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_app_ppo.checks import host
from rl_protocol import ConfigError


def test_little_memory_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available_bytes", lambda: 4 * 2**30 - 1)
    with pytest.raises(ConfigError, match=r"^4\.0 GiB free, less than 4 GiB: free memory, or choose a smaller model"):
        host.memory_text()
    monkeypatch.setattr(host, "available_bytes", lambda: 4 * 2**30)
    assert host.memory_text() == "4.0 GiB free"


def test_a_machine_without_dev_shm_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host, "SHM", tmp_path / "none")
    assert "POSIX shared memory" in host.shared_memory_text()


@pytest.mark.parametrize(("package", "text"), [("numpy", "numpy "), ("no-such-package", "pip install 'x[y]'")])
def test_a_missing_package_is_no_error_and_has_its_command(
    monkeypatch: pytest.MonkeyPatch, package: str, text: str
) -> None:
    monkeypatch.setitem(host.OPTIONAL, "a=b", ((package,), "y", "x[y]"))
    assert text in host.package_text("a=b")
