"""What `rl doctor` says of this machine."""

from __future__ import annotations

import errno
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

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
    assert host.shared_memory_text() == f"this system has no {tmp_path / 'none'}"


def test_a_small_dev_shm_is_said_to_matter_to_those_that_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.shutil, "disk_usage", lambda _: SimpleNamespace(free=64 << 20))
    monkeypatch.setattr(host, "SHM", Path(__file__).parent)
    with pytest.raises(ConfigError, match=r"^0\.1 GiB free, less than 1 GiB: enlarge /\S+ for Ray, NCCL and vLLM"):
        host.shared_memory_text()


@pytest.mark.parametrize(
    ("package", "text"), [("numpy", "numpy "), ("no-such-package", "; uv sync --extra y, or uv pip install 'x[y]'")]
)
def test_a_missing_package_is_no_error_and_has_its_command(
    monkeypatch: pytest.MonkeyPatch, package: str, text: str
) -> None:
    monkeypatch.setitem(host.OPTIONAL, "a=b", ((package,), "y", "'x[y]'"))
    assert text in host.package_text("a=b")


def test_a_limit_of_file_sizes_that_a_run_exceeds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def limit(nbytes: int) -> None:
        monkeypatch.setattr(resource, "getrlimit", lambda _: (nbytes, resource.RLIM_INFINITY))

    limit(2**20 * 3 // 2)
    with pytest.raises(ConfigError, match=r"allows files of 1\.5 MiB, and a run needs 64 MiB.*`ulimit -f unlimited`"):
        host.file_size_text(64 * 2**20)
    assert host.file_size_text(2**20) == "files may have 2 MiB"
    limit(resource.RLIM_INFINITY)
    assert host.file_size_text(2**60) == "files may have any size"


def test_a_limit_of_the_address_space_that_a_run_exceeds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def limit(nbytes: int) -> None:
        monkeypatch.setattr(resource, "getrlimit", lambda _: (nbytes, resource.RLIM_INFINITY))

    limit(host.ADDRESS_SPACE - 1)
    with pytest.raises(ConfigError, match=r"^ulimit -v allows .* GiB of address space.*`ulimit -v unlimited`"):
        host.address_space_text()
    limit(host.ADDRESS_SPACE)
    assert host.address_space_text() == f"processes may map {host.ADDRESS_SPACE >> 30} GiB"
    limit(resource.RLIM_INFINITY)
    assert host.address_space_text() == "processes may map any amount of memory"


def test_a_loopback_interface_that_is_down_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.loopback_text() == "processes reach each other at 127.0.0.1"

    def unreachable(address: tuple[str, int], timeout: float) -> None:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(host.socket, "create_connection", unreachable)
    with pytest.raises(
        ConfigError, match=r"each other at 127\.0\.0\.1 \(Network is unreachable\)\. Run `ip link set lo up`"
    ):
        host.loopback_text()


@pytest.mark.parametrize("command", ["doctor", "plan"])
def test_a_limit_below_the_libraries_of_torch_is_a_message(command: str, tmp_path: Path) -> None:
    rl = [sys.executable, "-c", "from rl_app_ppo.cli.entry import rl; rl()", command]
    done = subprocess.run(
        ["sh", "-c", 'ulimit -v 2000000; exec "$@"', "sh", *rl],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 2
    assert "ulimit -v allows 1.9 GiB of address space" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
