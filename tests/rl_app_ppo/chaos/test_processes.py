"""What a run has left behind is told from what other programs have in shared memory."""

from __future__ import annotations

import mmap
import threading

import pytest

from rl_app_ppo.chaos import processes
from rl_app_ppo.chaos.processes import left_in_memory, shared_memory


@pytest.fixture
def before():
    if not processes.SHARED_MEMORY.is_dir():
        pytest.skip("this system shows no files of shared memory")
    return shared_memory()


def _file(tmp_path):
    path = processes.SHARED_MEMORY / f"rl-test-{tmp_path.parent.name}-{tmp_path.name}"
    path.write_bytes(b"x" * mmap.PAGESIZE)
    return path


def test_a_file_that_stays_is_left(before, tmp_path):
    path = _file(tmp_path)
    try:
        assert path.name in left_in_memory(before, 0.0)
    finally:
        path.unlink()


def test_a_file_that_a_process_uses_is_not(before, tmp_path):
    path = _file(tmp_path)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        assert path.name not in left_in_memory(before, 0.0)
        path.unlink()


def test_a_file_that_is_deleted_after_its_program_ended_is_not(before, tmp_path):
    path = _file(tmp_path)
    later = threading.Timer(0.3, path.unlink)
    later.start()
    assert path.name not in left_in_memory(before, 30.0)
    later.join()
