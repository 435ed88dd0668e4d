"""Equal content has one folder, which is written once; damage is repaired."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_app_ppo.api.content_folder import keep
from rl_protocol import OutputError


def text(content: str):
    return lambda folder: (folder / "a.txt").write_text(content)


def test_equal_content_has_one_folder(tmp_path: Path):
    first, again, other = (keep(tmp_path / "cache", "rows", text(content)) for content in ("x", "x", "y"))
    assert first == again != other
    assert first.name.startswith("rows-")
    assert (other / "a.txt").read_text() == "y"
    assert sorted(tmp_path.joinpath("cache").iterdir()) == sorted([first, other]), "nothing unfinished is left"


def test_a_folder_that_is_there_stays(tmp_path: Path):
    before = (keep(tmp_path, "rows", text("x")) / "a.txt").stat()
    after = (keep(tmp_path, "rows", text("x")) / "a.txt").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_a_damaged_folder_is_replaced(tmp_path: Path):
    folder = keep(tmp_path, "reward", text("x"))
    (folder / "a.txt").write_text("something else")
    assert keep(tmp_path, "reward", text("x")) == folder
    assert (folder / "a.txt").read_text() == "x"


def test_the_names_of_files_count(tmp_path: Path):
    assert keep(tmp_path, "rows", text("x")) != keep(tmp_path, "rows", lambda folder: (folder / "b").write_text("x"))


def test_a_cache_that_cant_be_written_names_its_key(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"model\.cache_dir"):
        keep(tmp_path / "file" / "cache", "rows", text("x"))
