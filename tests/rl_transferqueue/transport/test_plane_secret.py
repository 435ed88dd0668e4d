"""Access from other hosts, where the key comes from, and two hosts that lose contact."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from network_helpers import MIB, NO_KEY, SMALL, other_client, rows_of, served

from rl_protocol import ConfigError
from rl_protocol.support.host_identity import this_host
from rl_transferqueue import LocalPlane, PlaneDescriptor, TransferQueueConfig, check_plane, connect, start_local_plane
from rl_transferqueue.transport.addresses import listen_address
from rl_transferqueue.transport.bulk_protocol import client_proof
from rl_transferqueue.transport.plane_secret import KEY, KEY_FILE, PlaneKey, load_key
from rl_transferqueue.wire.messages import Bye, Request, pack
from rl_transferqueue.wire.process_liveness import this_process

GOOD, BAD = "g" * 40, "b" * 40


# --------------------------------------------------------------------------------
# Keys
@pytest.fixture
def keyed(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalPlane]:
    monkeypatch.setenv(KEY, GOOD)
    with start_local_plane(SMALL) as plane:
        yield plane


def test_only_clients_with_the_key_are_admitted(keyed: LocalPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(match: str) -> None:
        began = time.monotonic()
        with pytest.raises(ConfigError, match=match):
            await connect(keyed.descriptor)
        assert time.monotonic() - began < 60

    async def main() -> None:
        async with await connect(keyed.descriptor) as client:
            meta = await client.put("p", ["a"], rows_of(3, MIB))
            monkeypatch.setenv(KEY, BAD)
            await refused(rf"another key.*{KEY_FILE}")
            monkeypatch.delenv(KEY)
            await refused(rf"no key.*{KEY_FILE}")
            assert (await client.get(meta)).dense("x").values.min() == 3

    asyncio.run(main())
    assert "no key" in other_client(keyed.descriptor).stderr
    assert other_client(keyed.descriptor, **{KEY: GOOD}).returncode == 0


def test_control_sockets_refuse_clients_without_the_key(keyed: LocalPlane) -> None:
    """Well-formed requests are answered only if they are encrypted with the right key."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    for server in (keyed.descriptor.controller,):
        for key, answered in ((NO_KEY, False), (PlaneKey(BAD.encode()), False), (PlaneKey(GOOD.encode()), True)):
            stranger = context.socket(zmq.DEALER)
            stranger.setsockopt(zmq.LINGER, 0)
            key.protect_client(stranger)
            stranger.connect(server.control)
            stranger.send(pack(Request(1, Bye())))
            assert bool(stranger.poll(60_000 if answered else 300)) is answered
            stranger.close()
    context.term()


def test_the_key_is_never_shown(keyed: LocalPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert GOOD not in repr(load_key()) + str(load_key()) + keyed.descriptor.to_json()
    for pid in keyed.pids:
        assert GOOD.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    with start_local_plane(SMALL, tmp_path, log_dir=tmp_path / "logs") as plane:
        monkeypatch.setenv(KEY, BAD)
        with pytest.raises(ConfigError) as refused:
            asyncio.run(connect(plane.descriptor))
    logs = "".join(path.read_text() for path in (tmp_path / "logs").iterdir())
    assert "a bulk connection was refused" in logs
    assert GOOD not in logs + str(refused.value)
    assert BAD not in logs + str(refused.value)


def test_where_the_key_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(GOOD + "\n")
    file.chmod(0o600)
    assert load_key({KEY_FILE: str(file)}).proof(b"x") == load_key({KEY: GOOD}).proof(b"x")
    assert load_key({KEY: GOOD}).proof(b"x") != load_key({KEY: BAD}).proof(b"x")
    assert not load_key({})
    for environment, match in (
        ({KEY: "short"}, "5 characters"),
        ({KEY: GOOD, KEY_FILE: str(file)}, "Both"),
        ({KEY_FILE: str(tmp_path / "ghost")}, "can't be read"),
    ):
        with pytest.raises(ConfigError, match=match) as wrong:
            load_key(environment)
        assert GOOD not in str(wrong.value)
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_key({KEY_FILE: str(file)})
    file.chmod(0o600)
    file.write_text("")
    with pytest.raises(ConfigError, match="0 characters"):
        load_key({KEY_FILE: str(file)})


def test_listening_beyond_loopback_takes_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY, raising=False)
    with pytest.raises(ConfigError, match=rf"10\.77\.0\.1.* needs a key: set {KEY_FILE}"):
        start_local_plane(TransferQueueConfig(listen="10.77.0.1"), tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert listen_address("10.77.0.1", PlaneKey(GOOD.encode())) == ("10.77.0.1", 0)
    assert listen_address("localhost", NO_KEY).host in ("127.0.0.1", "::1")
    for everywhere in ("0.0.0.0", "::"):
        with pytest.raises(ConfigError, match="every address"):
            listen_address(everywhere, PlaneKey(GOOD.encode()))
    with pytest.raises(ConfigError, match="no address"):
        listen_address("not an address", NO_KEY)
    with pytest.raises(ConfigError, match="listen must be an address"):
        TransferQueueConfig(shared_memory=False)


@pytest.mark.parametrize(
    ("listen", "expected"),
    [
        ("127.0.0.2:5600", ("127.0.0.2", 5600)),
        ("[::1]:5600", ("::1", 5600)),
        ("[::1]", ("::1", 0)),
        ("::1", ("::1", 0)),
        ("127.0.0.2", ("127.0.0.2", 0)),
    ],
)
def test_the_address_to_listen_on_may_have_a_port(listen: str, expected: tuple[str, int]) -> None:
    assert listen_address(listen, NO_KEY) == expected


@pytest.mark.parametrize("listen", ["127.0.0.2:", "127.0.0.2:0", "127.0.0.2:65536", "127.0.0.2:http", "[::1]:-1"])
def test_a_port_that_is_none_is_named(listen: str) -> None:
    with pytest.raises(
        ConfigError, match=r"must have a port in 1\.\.65535; got .*\. Write host, host:port or \[IPv6\]:port"
    ):
        listen_address(listen, NO_KEY)


def test_addresses_and_ports_that_can_not_be_had_are_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(KEY, GOOD)
    monkeypatch.delenv(KEY_FILE, raising=False)
    with socket.create_server(("127.0.0.2", 0)) as taken:
        port = taken.getsockname()[1]
        for first in (port, port - 1):  # the first port of the plane or a later one
            with pytest.raises(
                ConfigError, match=rf"listen='127\.0\.0\.2:{first}': port \d+ can't be used: Address already"
            ):
                check_plane(TransferQueueConfig(listen=f"127.0.0.2:{first}"))
    with pytest.raises(ConfigError, match=r"the address is not one of this host: Cannot assign"):
        check_plane(TransferQueueConfig(listen="203.0.113.7"))
    with pytest.raises(ConfigError, match=r"begins 4 ports.* set a port of at most 65532"):
        check_plane(TransferQueueConfig(listen="127.0.0.2:65533"))
    monkeypatch.delenv(KEY)
    with pytest.raises(ConfigError, match=r"10\.77\.0\.1.* needs a key"):
        check_plane(TransferQueueConfig(listen="10.77.0.1:5600"))
    check_plane(TransferQueueConfig())


def test_a_process_that_took_the_port_of_another_is_noticed(keyed: LocalPlane) -> None:
    descriptor = keyed.descriptor
    other = msgspec.structs.replace(
        descriptor.controller,
        process=msgspec.structs.replace(descriptor.controller.process, start=1),
    )
    with pytest.raises(ConfigError, match="not the process that the descriptor names"):
        asyncio.run(connect(msgspec.structs.replace(descriptor, controller=other)))


def test_a_proof_can_not_be_replayed_or_reflected() -> None:
    """A proof that was sent or received on one connection is worthless on another."""
    key = PlaneKey(GOOD.encode())
    with served(key) as server:

        def said(words: bytes | None) -> tuple[bytes, bytes]:
            with socket.create_connection(("127.0.0.1", server.port), timeout=60) as peer:
                nonce = peer.recv(36, socket.MSG_WAITALL)[4:]
                mine = bytes(32)
                identity = (key, this_host(), this_process(), nonce + mine, b"s" * 8)
                words = words or b"s" * 8 + mine + client_proof(*identity)
                peer.sendall(words)
                return words, peer.recv(33, socket.MSG_WAITALL)

        words, verdict = said(None)
        assert verdict[0] == 1
        assert said(words)[1] == bytes(33)
        assert said(words[:40] + verdict[1:])[1] == bytes(33)


# --------------------------------------------------------------------------------
# Two hosts
HOST = """
import sys
from rl_transferqueue import TransferQueueConfig, start_local_plane

config = TransferQueueConfig(num_storage_units=1, capacity_mb=8, segment_mb=1, listen=sys.argv[1], shared_memory=False)
with start_local_plane(config) as plane:
    print(plane.descriptor.to_json(), flush=True)
    sys.stdin.read()
"""

PARTED_CLIENT = """
import asyncio, sys
import numpy as np
from rl_protocol import BatchData, PlaneLostError, dense
from rl_transferqueue import PlaneDescriptor, connect
from rl_transferqueue.wire.messages import Reserve, Reserved

async def main():
    client = await connect(PlaneDescriptor.from_json(sys.argv[1]))
    await client.put("p", ["kept"], BatchData({"x": dense(np.ones((1, 1 << 20), np.uint8))}))
    await client._controller.call(Reserve(6 << 20, 0.0), Reserved, 60)
    print("up", flush=True)
    try:
        await client.wait_ready("never", count=1, timeout_s=60)
    except PlaneLostError:
        print("lost", flush=True)
    await client.close()

asyncio.run(main())
"""

CLIENT_THAT_STAYED = """
import asyncio, sys
import numpy as np
from rl_protocol import BatchData, dense
from rl_transferqueue import PlaneDescriptor, connect

async def main():
    async with await connect(PlaneDescriptor.from_json(sys.argv[1])) as client:
        await client.put("q", ["a"], BatchData({"x": dense(np.ones((1, 6 << 20), np.uint8))}), timeout_s=60)
        print((await client.stats()).bytes_used >> 20, await client.clear("p"))

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[tuple[str, str, str]]:
    """Yield two network namespaces joined by a virtual cable, and the address of the first."""
    one, two = f"rltq{os.getpid()}a", f"rltq{os.getpid()}b"
    commands = [
        f"ip netns add {one}",
        f"ip netns add {two}",
        f"ip -n {one} link add cable type veth peer name cable netns {two}",
        f"ip -n {one} addr add 10.77.0.1/24 dev cable",
        f"ip -n {two} addr add 10.77.0.2/24 dev cable",
        f"ip -n {one} link set lo up",
        f"ip -n {one} link set cable up",
        f"ip -n {two} link set cable up",
    ]
    try:
        for command in commands:
            if shutil.which("ip") is None:
                pytest.skip("there is no `ip` here")
            done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"network namespaces are not permitted here: {command}: {done.stderr.strip()}")
        yield one, two, "10.77.0.1"
    finally:
        for name in (one, two):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def test_a_client_on_another_host(two_hosts: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A client with the key can connect; if all packets are lost, both sides notice in seconds.

    The plane then frees the memory that the client had reserved.
    """
    one, two, address = two_hosts
    here, there = (["ip", "netns", "exec", name] for name in (one, two))
    monkeypatch.setenv(KEY, GOOD)
    command = [*here, sys.executable, "-W", "error", "-c", HOST, address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as host:
        assert host.stdout is not None
        descriptor = PlaneDescriptor.from_json(host.stdout.readline())
        done = other_client(descriptor, *there)
        assert (done.stdout, done.returncode) == ("False\n", 0), done.stderr
        assert "no key" in other_client(descriptor, *there, **{KEY: ""}).stderr
        command = [*there, sys.executable, "-W", "error", "-c", PARTED_CLIENT, descriptor.to_json()]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as parted:
            assert parted.stdout is not None
            assert parted.stdout.readline() == b"up\n"
            began = time.monotonic()
            # Send all frames to a hardware address that does not exist.
            for host_of, other in ((one, "10.77.0.2"), (two, address)):
                nowhere = f"ip -n {host_of} neigh replace {other} lladdr 02:00:00:00:00:01 nud permanent dev cable"
                subprocess.run(nowhere.split(), check=True)
            assert parted.stdout.readline() == b"lost\n"
            assert time.monotonic() - began < 60
        command = [*here, sys.executable, "-W", "error", "-c", CLIENT_THAT_STAYED, descriptor.to_json()]
        done = subprocess.run(command, capture_output=True, check=False, timeout=300)
        assert done.stdout == b"7 1\n", done.stderr.decode()[-400:]
        assert host.stdin is not None
        host.stdin.close()
