"""What faults do to processes, connections and files."""

from __future__ import annotations

import resource
import signal
import socket
import subprocess
import sys

import pytest

from rl_app_ppo.chaos.schedule import Fault, Strike, Victim
from rl_app_ppo.chaos.strikes import cut_connection, flip_byte, flippable, limit_files, narrow_connections, send, strike

CHILD = """
import socket, sys
from pathlib import Path
client = socket.socket(socket.AF_UNIX)
client.connect(sys.argv[1])
pair = socket.socketpair()
print("up", flush=True)
if sys.stdin.readline().strip() == "buffer":
    print(client.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF), flush=True)
    sys.stdin.readline()
try:
    Path(sys.argv[2]).write_text("x")
    print("written", flush=True)
except OSError as error:
    print(error.strerror, flush=True)
"""


@pytest.fixture
def child(tmp_path):
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(tmp_path / "s"))
    server.listen()
    server.settimeout(60)
    command = [sys.executable, "-c", CHILD, str(tmp_path / "s"), str(tmp_path / "file")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        connection, _ = server.accept()
        connection.settimeout(60)
        assert process.stdout.readline() == "up\n"
        yield process, connection
        process.kill()
    connection.close()
    server.close()


def test_a_connection_is_cut_while_its_process_lives(child):
    process, connection = child
    assert cut_connection(process.pid, 5)
    assert connection.recv(1) == b""
    assert process.communicate("\n", timeout=60)[0] == "written\n"


def test_a_slow_connection_takes_little_at_a_time_and_its_process_goes_on(child):
    process, _ = child
    slow = Strike(victim=Victim.ROLLOUT, fault=Fault.SLOW_LINK, seconds=0.1)
    assert strike([process.pid], slow) == 1
    process.stdin.write("buffer\n")
    process.stdin.flush()
    assert int(process.stdout.readline()) < 8192  # the default has 26 times as much
    assert process.communicate("\n", timeout=60)[0] == "written\n"


def full_disk(seconds):
    return Strike(victim=Victim.TRAINER, fault=Fault.FULL_DISK, seconds=seconds)


def test_writes_fail_while_the_disk_is_full(child):
    process, _ = child
    assert strike([process.pid], full_disk(0.0)) == 1
    assert process.communicate("\n", timeout=60)[0] == "File too large\n"


def test_a_disk_that_was_full_takes_writes_again(child):
    process, _ = child
    assert strike([process.pid], full_disk(0.01)) == 1
    assert resource.prlimit(process.pid, resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    assert process.communicate("\n", timeout=60)[0] == "written\n"


def test_a_process_that_has_ended_is_not_struck(child):
    process, _ = child
    process.kill()
    process.wait(60)
    assert not send(process.pid, signal.SIGKILL)
    assert not limit_files(process.pid, 0)
    assert not cut_connection(process.pid, 0)
    assert not narrow_connections(process.pid)


def test_one_byte_before_the_zeros_at_the_end_changes(tmp_path):
    files = [tmp_path / "a", tmp_path / "b"]
    files[0].write_bytes(b"abc\0\0")
    files[1].write_bytes(b"de\0")
    assert flip_byte(files, 8)  # the fourth of five
    assert (files[0].read_bytes(), files[1].read_bytes()) == (b"abc\0\0", b"te\0")
    files[0].write_bytes(b"\0")
    assert not flip_byte(files[:1], 3)


def test_the_newest_checkpoint_and_all_segments_are_changed(tmp_path):
    for name in ("journal/segments/segment-1", "checkpoints/step-000002/a/b", "checkpoints/step-000004/a/c"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(b"x")
    places = tmp_path / "journal", tmp_path / "checkpoints"
    assert flippable(Fault.FLIP_SEGMENT, *places) == [tmp_path / "journal/segments/segment-1"]
    assert flippable(Fault.FLIP_CHECKPOINT, *places) == [tmp_path / "checkpoints/step-000004/a/c"]
    assert flippable(Fault.FLIP_CHECKPOINT, tmp_path, tmp_path / "none") == []
