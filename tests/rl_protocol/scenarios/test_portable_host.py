"""Linux's own facilities and the portable ones pass the same tests."""

from __future__ import annotations

import mmap
import os
import select
import signal
import subprocess
import sys

import pytest

from rl_protocol.support import host_identity
from rl_protocol.support.host import portable, process_watch, shared_memory
from rl_protocol.support.network_interface import interfaces, this_network

linux = pytest.mark.skipif(sys.platform != "linux", reason="memfd and pidfd are Linux's")


@pytest.fixture(params=[pytest.param("0", marks=linux, id="linux"), pytest.param("1", id="portable")])
def _way(request, monkeypatch):
    """Use one way in this process and its children."""
    monkeypatch.setenv(portable.VARIABLE, request.param)
    portable.uses_linux.cache_clear()
    host_identity.this_host.cache_clear()
    this_network.cache_clear()
    yield
    portable.uses_linux.cache_clear()
    host_identity.this_host.cache_clear()
    this_network.cache_clear()


pytestmark = pytest.mark.usefixtures("_way")


def child(code: str) -> subprocess.Popen[str]:
    """A process that runs this code; stop it with `communicate`."""
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def said_by(code: str) -> str:
    return child(code).communicate(timeout=60)[0].strip()


def readable(fd: int, timeout_s: float) -> bool:
    return bool(select.select([fd], [], [], timeout_s)[0])


def test_the_switch_decides():
    assert portable.uses_linux() is (os.environ[portable.VARIABLE] == "0")


def test_another_process_maps_memory_by_pid_and_number():
    fd = shared_memory.create_memory("test")
    os.ftruncate(fd, mmap.PAGESIZE)
    ours = mmap.mmap(fd, mmap.PAGESIZE)
    ours[:5] = b"hello"
    code = f"""
import mmap, os
from rl_protocol.support.host.shared_memory import memory_path
fd = os.open(memory_path({os.getpid()}, {fd}), os.O_RDWR)
memory = mmap.mmap(fd, {mmap.PAGESIZE})
memory[:5] = memory[:5].upper()
"""
    assert said_by(code) == ""
    assert ours[:5] == b"HELLO"
    os.close(fd)
    assert ours[:5] == b"HELLO"  # as long as it is mapped


def test_memory_of_a_killed_process_is_removed_by_the_next_one():
    owner = child(
        "import sys\nfrom rl_protocol.support.host.shared_memory import *\nprint(create_memory('x'), flush=True)\nsys.stdin.read()"
    )
    assert owner.stdout is not None
    number = int(owner.stdout.readline())
    assert shared_memory.memory_path(owner.pid, number).stat().st_mode & 0o077 == 0 or portable.uses_linux()
    owner.send_signal(signal.SIGKILL)
    owner.communicate(timeout=60)
    said_by("from rl_protocol.support.host.shared_memory import create_memory; create_memory('y')")
    with pytest.raises(FileNotFoundError):
        shared_memory.memory_path(owner.pid, number).stat()
    assert not list(portable.SHARED_FOLDER.glob(f"rl-memory-{owner.pid}-*"))


def test_a_process_that_ends_makes_its_descriptor_readable():
    process = child("import sys; sys.stdin.read()")
    watched = process_watch.open_process(process.pid)
    before = process_watch.start_of(process.pid)
    assert before == process_watch.start_of(process.pid)
    assert before is not None
    assert not readable(watched, 0.2)
    process.kill()  # and is not waited for: a zombie has ended
    assert readable(watched, 60)
    assert process_watch.start_of(process.pid) is None
    process.communicate(timeout=60)
    os.close(watched)
    with pytest.raises(ProcessLookupError):
        process_watch.open_process(process.pid)


def test_a_descriptor_that_is_closed_is_watched_no_longer():
    for _ in range(3):
        os.close(process_watch.open_process(os.getpid()))
    process = child("import sys; sys.stdin.read()")
    watched = process_watch.open_process(process.pid)
    process.communicate(timeout=60)
    assert readable(watched, 60)
    os.close(watched)


def test_processes_of_a_host_agree_on_its_name_and_on_that_of_its_network():
    code = (
        "from rl_protocol.support.host_identity import this_host\n"
        "from rl_protocol.support.network_interface import this_network\n"
        "print(this_host(), this_network())"
    )
    assert said_by(code) == f"{host_identity.this_host()} {this_network()}"


def test_loopback_is_an_interface():
    assert any(str(one.ip) == "127.0.0.1" for one in interfaces().values())


def test_a_fork_has_memory_and_a_watch_of_its_own():
    fds = shared_memory.create_memory("test"), process_watch.open_process(os.getpid())
    code = """
import os
from rl_protocol.support.host.process_watch import open_process
from rl_protocol.support.host.shared_memory import create_memory, memory_path
create_memory("before"), open_process(os.getpid())
if not (child := os.fork()):
    number = create_memory("in the fork")
    open_process(os.getppid())
    print(memory_path(os.getpid(), number).stat().st_size, flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""
    assert said_by(code) == "0"
    os.close(fds[0])
    os.close(fds[1])


def test_memory_of_a_killed_process_is_not_found():
    owner = child(
        "import sys\nfrom rl_protocol.support.host.shared_memory import *\nprint(create_memory('x'), flush=True)\nsys.stdin.read()"
    )
    assert owner.stdout is not None
    number = int(owner.stdout.readline())
    owner.send_signal(signal.SIGKILL)
    owner.communicate(timeout=60)
    with pytest.raises(FileNotFoundError):
        shared_memory.memory_path(owner.pid, number).stat()


def test_closed_memory_is_freed():
    fd = shared_memory.create_memory("test")
    shared_memory.allocate(fd, 0, mmap.PAGESIZE + 1)
    path = shared_memory.memory_path(os.getpid(), fd)
    assert path.stat().st_size == mmap.PAGESIZE + 1
    shared_memory.close_memory(fd)
    with pytest.raises(FileNotFoundError):
        path.stat()


def test_a_process_ends_with_its_parent():
    """Its code would run for a minute."""
    inner = "import time; from rl_protocol.support.host.this_process import *; end_with_parent(); print(flush=True); time.sleep(60)"
    parent = child(
        f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {inner!r}]).pid, flush=True); input()"
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert parent.stdout.readline() == "\n"
    ended = process_watch.open_process(pid)
    parent.send_signal(signal.SIGKILL)
    parent.communicate(timeout=60)
    assert readable(ended, 60)
    os.close(ended)
