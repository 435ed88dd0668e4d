"""Two network namespaces with a cable between them, and a Ray node in each."""

from __future__ import annotations

import secrets
import subprocess
import sys
import time
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

HEAD, OTHER, PORT = "10.77.0.1", "10.77.0.2", 6399
"""Addresses and a port that exist in the two network namespaces alone."""
REACHED = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)"


def private_cluster(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Set the keys of a cluster beyond loopback, and the mark of the first host: namespaces of the
    network alone would share memory.
    """
    key = folder / "key"
    key.touch(0o600)
    key.write_text(secrets.token_hex(32))
    for name in ("RL_TQ_KEY_FILE", "RL_CKPT_KEY_FILE"):
        monkeypatch.setenv(name, str(key))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    monkeypatch.setenv("RL_HOST", "a")


@contextmanager
def namespaces() -> Generator[tuple[str, str]]:
    """Two network namespaces with a cable between them, without a way to any other network."""
    names = [f"rl{uuid.uuid4().hex[:8]}" for _ in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, address in zip(names, (HEAD, OTHER), strict=True):
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"NOT TESTED: ranks in two network namespaces, which this machine refuses: {error}")
    try:
        yield names[0], names[1]
    finally:
        for name in names:
            ip("netns", "del", name)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=60)


@contextmanager
def node(namespace: str, environment: dict[str, str], *words: str) -> Generator[None]:
    """A Ray node in a network namespace."""
    ray = [str(Path(sys.executable).parent / "ray"), "start", "--block", "--num-cpus=2", *words]
    process = subprocess.Popen(
        ["ip", "netns", "exec", namespace, *ray, f"--object-store-memory={80 << 20}"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def two_nodes_in(first: str, second: str, environment: dict[str, str]) -> Generator[None]:
    """A Ray cluster of a node in each namespace; the head is in the first."""
    head = (f"--node-ip-address={HEAD}", f"--port={PORT}", "--head", "--include-dashboard=false")
    with node(first, environment, *head):
        reachable = ["ip", "netns", "exec", second, sys.executable, "-c", REACHED, HEAD, str(PORT)]
        deadline = time.monotonic() + 200
        while subprocess.run(reachable, check=False, capture_output=True, timeout=60).returncode:
            assert time.monotonic() < deadline
        words = (f"--node-ip-address={OTHER}", f"--address={HEAD}:{PORT}")
        with node(second, {**environment, "RL_HOST": "b"}, *words):
            yield
