"""Two network namespaces with a cable between them, a Ray node in each, and runs over both."""

from __future__ import annotations

import secrets
import subprocess
import sys
import time
import uuid
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

HEAD, OTHER, PORT = "10.77.0.1", "10.77.0.2", 6399
"""Addresses and a port that exist in the two network namespaces alone."""
STARTING_S = 400.0
"""How long a node may take to start and join, at a high load."""
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
def namespaces(delay_s: float | None = None) -> Generator[tuple[str, str]]:
    """Two network namespaces with a cable between them, without a way to any other network.

    Args:
        delay_s: seconds that a packet takes in each direction; 0: packets are carried as with a
            delay, and arrive at once; None: a pair of devices of the kernel (veth).
    """
    first, second = names = [f"rl{uuid.uuid4().hex[:8]}" for _ in range(2)]
    with ExitStack() as link:
        try:
            for name in names:
                ip("netns", "add", name)
                link.callback(ip, "netns", "del", name)
            if delay_s is None:
                ip("link", "add", "cable", "netns", first, "type", "veth", "peer", "name", "cable", "netns", second)
            else:
                link.enter_context(delayed_link(first, second, delay_s))
            for name, address in zip(names, (HEAD, OTHER), strict=True):
                ip("-n", name, "link", "set", "lo", "up")
                ip("-n", name, "link", "set", "cable", "up")
                ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"NOT TESTED: ranks in two network namespaces, which this machine refuses: {error}")
        yield first, second


@contextmanager
def delayed_link(first: str, second: str, delay_s: float) -> Generator[None]:
    """A cable whose packets take this many seconds in each direction (`delayed_link.py`).

    Raises:
        OSError: this machine makes no TUN devices in network namespaces.
    """
    words = [sys.executable, str(Path(__file__).with_name("delayed_link.py")), first, second, str(delay_s)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise OSError(process.communicate(timeout=60)[1])
            for name in (first, second):  # none is dropped while the process waits for a core
                ip("-n", name, "link", "set", "cable", "txqueuelen", "10000")
            yield
        finally:
            process.kill()


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
        deadline = time.monotonic() + STARTING_S
        while subprocess.run(reachable, check=False, capture_output=True, timeout=60).returncode:
            assert time.monotonic() < deadline
        words = (f"--node-ip-address={OTHER}", f"--address={HEAD}:{PORT}")
        with node(second, {**environment, "RL_HOST": "b"}, *words):
            yield


def run_in(namespace: str, words: list[str]) -> subprocess.CompletedProcess[str]:
    """Run the app, again while a node starts."""
    deadline = time.monotonic() + STARTING_S
    while True:
        done = subprocess.run(
            ["ip", "netns", "exec", namespace, *words], capture_output=True, text=True, timeout=600, check=False
        )
        if not nodes_start(done.stderr) or time.monotonic() > deadline:
            return done


def nodes_start(error: str) -> bool:
    """Whether the app ended because a node still starts: the head answers late, or the other is not
    there."""
    return "Failed to connect to Ray cluster" in error or "needs 2 hosts" in error
