"""A Ray that a run would meet: at `ray.address`, in RAY_ADDRESS, or beside its own."""

from __future__ import annotations

import json
import os
import platform
import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ray
import ray._raylet

from rl_app_ppo.checks.ray_clusters import check_address_is_read, check_cluster, check_no_other, check_ray_folder
from rl_app_ppo.config.schema import RayConfig
from rl_protocol import ConfigError

SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


@contextmanager
def server(answer: bytes) -> Generator[str]:
    """The address of a server that answers one connection so."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            peer, _ = listening.accept()
            with peer:
                assert peer.recv(24, socket.MSG_WAITALL).startswith(b"PRI * HTTP/2.0")
                peer.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        thread.join()


def cluster(monkeypatch: pytest.MonkeyPatch, **changes: str) -> None:
    """Any address is that of a cluster with these versions instead of ours."""
    stored = {"ray_version": ray.__version__, "python_version": platform.python_version(), **changes}
    client = SimpleNamespace(internal_kv_get=lambda *_, **__: json.dumps(stored).encode())
    monkeypatch.setattr(ray._raylet, "GcsClient", lambda address: client)


def test_a_cluster_with_our_versions_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster(monkeypatch)
    with server(SETTINGS) as address:
        assert check_cluster(RayConfig(address=address)).startswith(
            f"a cluster of Ray {ray.__version__} with Python 3."
        )


@pytest.mark.parametrize("theirs", [{"ray_version": "1.13.0"}, {"python_version": "3.8.2"}])
def test_a_cluster_of_another_ray_or_python_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, theirs: dict[str, str]
) -> None:
    cluster(monkeypatch, **theirs)
    with server(SETTINGS) as address, pytest.raises(ConfigError) as refused:
        check_cluster(RayConfig(address=address))
    for word in (address, *theirs.values(), ray.__version__, platform.python_version(), "ray.address=local"):
        assert word in str(refused.value)


def test_a_server_of_something_else_is_no_cluster() -> None:
    said = r"What answers at ray\.address=.* is no Ray cluster\. Start one"
    with server(b"HTTP/1.1 400 Bad Request\r\n\r\n") as address, pytest.raises(ConfigError, match=said):
        check_cluster(RayConfig(address=address))


def test_auto_answers_with_the_token_of_the_user_before_it_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private.authentication import authentication_token_setup as setup

    def asked(address: str) -> SimpleNamespace:
        order.append(address)
        return SimpleNamespace(internal_kv_get=lambda *_, **__: b"{}")

    order = list[str]()
    monkeypatch.setattr(ray._raylet, "GcsClient", asked)
    monkeypatch.setattr(
        setup, "maybe_enable_token_auth_if_token_available", lambda warn_if_disabled: order.append("token")
    )
    with server(SETTINGS) as address:
        check_cluster(RayConfig(address=address))  # Ray gives no token to an address of somebody else
    assert order == [address]
    with server(SETTINGS) as address:
        monkeypatch.setenv("RAY_ADDRESS", address)
        check_cluster(RayConfig(address="auto"))
    assert order[1:] == ["token", address]


def test_auto_without_a_cluster_is_refused_and_with_ray_address_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import services

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(services, "find_gcs_addresses", set)
    monkeypatch.setattr(services, "find_bootstrap_address", lambda folder: None)
    with pytest.raises(ConfigError, match=r"ray\.address=auto finds no Ray cluster.*RAY_ADDRESS is not set"):
        check_cluster(RayConfig(address="auto"))
    cluster(monkeypatch)
    with server(SETTINGS) as address:
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert check_cluster(RayConfig(address="auto")).endswith(f"answers at {address}")


def test_ray_address_that_the_run_does_not_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert check_address_is_read(RayConfig()) == "RAY_ADDRESS is not set"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert check_address_is_read(RayConfig(address="auto")) == "RAY_ADDRESS=10.0.0.1:6379 is used"
    with pytest.raises(ConfigError, match=r"ray\.address=local does not use it: set ray\.address=auto"):
        check_address_is_read(RayConfig())


def test_a_ray_of_somebody_else_on_this_machine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def processes(*names: str) -> None:
        found = [SimpleNamespace(info={"name": name, "pid": 7, "username": "bob"}) for name in names]
        monkeypatch.setattr(psutil, "process_iter", lambda attrs: iter(found))

    processes("bash", "gcs_server")
    with pytest.raises(ConfigError, match=r"gcs_server: process 7 of bob.*ray stop.*ray\.address=auto"):
        check_no_other(RayConfig())
    check_no_other(RayConfig(address="auto"))
    processes("bash", "raylet")
    check_no_other(RayConfig())


def test_a_folder_that_the_sockets_of_ray_can_not_lie_in_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    assert check_ray_folder(RayConfig()) == "/tmp"
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "no"))
    with pytest.raises(ConfigError, match=rf"RAY_TMPDIR={tmp_path}/no, .* must be a folder .* or unset it\.$"):
        check_ray_folder(RayConfig())
    check_ray_folder(RayConfig(address="auto"))
    monkeypatch.setattr(Path, "is_dir", lambda _: True)
    monkeypatch.setattr(os, "access", lambda *_: True)
    monkeypatch.setattr(os, "getpid", lambda: 4_194_304)
    monkeypatch.setenv("RAY_TMPDIR", "/scratch/a/user")
    check_ray_folder(RayConfig())
    monkeypatch.setenv("RAY_TMPDIR", "/scratch/a/users")
    with pytest.raises(ConfigError, match=r"must have a path of at most 15 bytes, .* got 16\. Set RAY_TMPDIR"):
        check_ray_folder(RayConfig())
