"""Run folders are new, locked, and published whole; failed writes name the path and the remedy."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from forked import forked

from rl_app_ppo.outputs import run_folder
from rl_app_ppo.outputs.metrics_file import JSONLSink
from rl_app_ppo.outputs.run_folder import (
    check_room,
    create_run_folder,
    files_of,
    is_free,
    occupied,
    publish_folder,
    writing,
)
from rl_protocol import ConfigError, OutputError


def test_a_full_disk_is_an_output_error_that_names_the_path():
    sink = JSONLSink(Path("/dev/full"))
    with pytest.raises(OutputError, match=r"/dev/full: No space left on device.*trainer\.output_dir"):
        sink.log(1, {"a": 1.0})
    with pytest.raises(OutputError):  # the buffered text can't be written either
        sink.close()


def test_runs_that_start_in_the_same_second_get_a_folder_each(tmp_path):
    folder = tmp_path / "outputs" / "2026-01-01_00-00-00_grpo_seed1"
    together = threading.Barrier(8)

    def start(_):
        together.wait(60)
        return create_run_folder(folder, named=False).path.name

    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(start, range(8)))
    assert sorted(names) == [folder.name, *(f"{folder.name}_{number}" for number in range(2, 9))]


def test_a_run_folder_is_new_and_empty(tmp_path):
    made = create_run_folder(tmp_path / "outputs" / "a")
    assert made.is_new
    assert not list(made.path.iterdir())
    assert not create_run_folder(tmp_path / "outputs" / "a", resume=True).is_new
    (made.path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(OutputError, match=r"^/.*/outputs/a exists already; .*trainer\.resume_mode=auto\.$"):
        create_run_folder(tmp_path / "outputs" / "a")


@pytest.mark.parametrize(
    "left", [(), ("config.yaml", "logs/", "record/"), ("config.yaml", "attempts/", "metrics.jsonl")]
)
def test_a_start_that_was_interrupted_does_not_keep_its_name(tmp_path, left):
    fill(tmp_path / "a", left)
    made = create_run_folder(tmp_path / "a")
    assert not made.is_new
    assert {path.name for path in made.path.iterdir()} == {name.rstrip("/") for name in left}


@pytest.mark.parametrize("left", ["checkpoints/", "checkpoint/", "journal/", "samples/", "batches/", "my-notes.txt"])
def test_a_folder_with_anything_that_a_run_has_made_keeps_its_name(tmp_path, left):
    fill(tmp_path / "a", ["config.yaml", left])
    with pytest.raises(OutputError, match="exists already"):
        create_run_folder(tmp_path / "a")


def test_a_run_that_starts_keeps_its_name(tmp_path):
    fill(tmp_path / "a", ["config.yaml"])
    with occupied(tmp_path / "a"), pytest.raises(OutputError, match="exists already"):
        create_run_folder(tmp_path / "a")


def fill(folder, names):
    """Make files, and folders for names with a slash."""
    folder.mkdir()
    for name in names:
        (folder / name).mkdir() if name.endswith("/") else (folder / name).write_text("")


def test_a_folder_that_cannot_be_made_or_has_no_room_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"file/a.*trainer\.output_dir"):
        create_run_folder(tmp_path / "file" / "a")
    with pytest.raises(OutputError, match=r"less than trainer\.min_free_disk_mb=1000000000"):
        check_room(tmp_path / "b", 10**9)
    assert not (tmp_path / "b").exists()
    assert check_room(tmp_path / "b" / "c", 0).endswith(f" MiB free in {tmp_path}")
    with pytest.raises(OutputError, match=r"file is a file\. Set trainer\.output_dir to a folder"):
        check_room(tmp_path / "file" / "outputs", 0)


def test_a_read_only_file_system_is_named(tmp_path):
    with pytest.raises(OutputError, match="Read-only file system"), writing(tmp_path):
        raise OSError(errno.EROFS, "Read-only file system")


def test_folders_are_published_whole(tmp_path):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "x").write_text("1")
    publish_folder(tmp_path / "new", tmp_path / "final")
    assert (tmp_path / "final" / "x").read_text() == "1"
    assert not (tmp_path / "new").exists()


HOLDER = """
import sys
from pathlib import Path
from rl_app_ppo.outputs.run_folder import occupied
with occupied(Path(sys.argv[1])):
    print("in", flush=True)
    sys.stdin.read()
"""


def test_a_run_keeps_others_out_of_its_folder_and_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    def holder() -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "in\n"
        return process

    first = holder()
    (tmp_path / ".report.html.7").touch()
    half = [tmp_path / ".checkpoint", tmp_path / "checkpoints" / ".saving-step-000004"]
    whole = [tmp_path / "checkpoint", tmp_path / "checkpoints" / "step-000002"]
    for folder in (*half, *whole):
        folder.mkdir(parents=True)
        (folder / "file").write_text("x")
    with pytest.raises(OutputError, match=r"Another run writes to .*trainer\.run_name"), occupied(tmp_path):
        pass
    assert all(folder.exists() for folder in half)
    first.kill()
    first.communicate()
    with occupied(tmp_path):
        assert [folder.exists() for folder in (*half, *whole)] == [False, False, True, True]
        assert not (tmp_path / ".report.html.7").exists()
    with occupied(tmp_path):
        pass


def test_a_reader_that_holds_the_lock_for_a_moment_does_not_keep_a_run_out(tmp_path: Path) -> None:
    waits = []
    reader = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(reader, fcntl.LOCK_SH)

    def wait(seconds: float) -> None:
        waits.append(seconds)
        os.close(reader)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_folder.time, "sleep", wait)
        with occupied(tmp_path):
            assert len(waits) == 1
            assert not is_free(tmp_path)
    assert is_free(tmp_path)


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_run_that_has_ended_leaves_its_folder_free_while_a_forked_process_lives(tmp_path: Path) -> None:
    with ExitStack() as stack:
        with occupied(tmp_path):
            stack.enter_context(forked())
        assert is_free(tmp_path)


def test_a_path_that_no_folder_can_have_is_refused(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for path in (loop, tmp_path / ("a" * 300)):
        with pytest.raises(ConfigError, match="is no folder of a run"):
            files_of(path)


def test_who_names_no_run_reads_which_runs_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for age, name in enumerate(("old", "new")):
        (tmp_path / "outputs" / name).mkdir(parents=True)
        (tmp_path / "outputs" / name / "config.yaml").touch()
        os.utime(tmp_path / "outputs" / name / "config.yaml", (age, age))
    assert files_of(tmp_path / "outputs" / "new").folder == tmp_path / "outputs" / "new"
    monkeypatch.chdir(tmp_path)
    for given in ("outputs", "outputs/neu"):
        with pytest.raises(
            ConfigError, match=rf"^{given} is no folder of a run.*; there are outputs/new, outputs/old\.$"
        ):
            files_of(Path(given))
    with pytest.raises(ConfigError, match=r"printed at its start\.$"):
        files_of(tmp_path / "elsewhere" / "run")
