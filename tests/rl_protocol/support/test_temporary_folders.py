"""Folders of killed processes are removed; those of live processes stay."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from rl_protocol.support.temporary_folders import MARK, sweep, temporary_folder

OWNER = """
import sys
from pathlib import Path
from rl_protocol.support.temporary_folders import temporary_folder
with temporary_folder("t-", Path(sys.argv[1])) as folder:
    (folder / "half").write_text("x")
    print(folder.name, flush=True)
    sys.stdin.read()
"""


def owner(parent):
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    return process, process.stdout.readline().strip()


def names(parent):
    return sorted(path.name for path in parent.iterdir())


def test_the_folder_of_a_killed_process_goes_and_that_of_a_living_one_stays(tmp_path):
    killed, gone = owner(tmp_path)
    killed.kill()
    killed.communicate()
    assert names(tmp_path) == [gone]
    living, stays = owner(tmp_path)
    assert names(tmp_path) == [stays]
    with temporary_folder("t-", tmp_path) as mine:
        assert names(tmp_path) == sorted([stays, mine.name])
        assert mine.stat().st_mode & 0o777 == 0o700
    living.communicate("")
    assert living.returncode == 0
    assert names(tmp_path) == []


def test_a_folder_is_removed_when_its_use_fails(tmp_path):
    with pytest.raises(ValueError, match="broke"), temporary_folder("t-", tmp_path):
        raise ValueError("it broke")
    assert names(tmp_path) == []


def test_nothing_else_is_touched(tmp_path):
    kept = tmp_path / "kept"
    (tmp_path / "other-1").mkdir()
    kept.mkdir()
    (kept / "file").write_text("x")
    (kept / MARK).touch()
    (tmp_path / "t-link").symlink_to(kept)
    (tmp_path / "t-of-the-user").mkdir()
    (tmp_path / "t-file").write_text("x")
    sweep("t-", tmp_path)
    sweep("t-", tmp_path / "missing")
    assert names(tmp_path) == ["kept", "other-1", "t-file", "t-link", "t-of-the-user"]
    assert (kept / "file").exists()


def test_many_at_once_do_not_remove_each_others(tmp_path):
    def use(_):
        with temporary_folder("t-", tmp_path) as folder:
            (folder / "file").write_text("x")
            return (folder / "file").read_text()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(use, range(200))) == ["x"] * 200
    assert names(tmp_path) == []
