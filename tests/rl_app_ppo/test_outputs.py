"""Sinks, run folders and rewards: what is written can be read back by the tools it is for, and failing writes name path and remedy."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest

from rl_app_ppo.console import step_line, validation_accuracy
from rl_app_ppo.outputs import (
    JSONLSink,
    TensorBoardSink,
    create_run_folder,
    draw_curve,
    occupied,
    publish_folder,
    writing,
)
from rl_protocol import OutputError


def test_jsonl_is_there_line_by_line(tmp_path):
    sink = JSONLSink(tmp_path / "metrics.jsonl")
    sink.log(1, {"a": 1.5})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "a": 1.5}
    sink.log(2, {"a": 2.0})
    sink.close()
    sink.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_full_disk_is_an_output_error_that_names_the_path():
    sink = JSONLSink(Path("/dev/full"))
    with pytest.raises(OutputError, match=r"/dev/full: No space left on device.*trainer\.output_dir"):
        sink.log(1, {"a": 1.0})
    with pytest.raises(OutputError):  # what is still buffered can't be written either
        sink.close()


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_tensorboard_reads_its_events(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path)
    sink.log(1, {"actor/pg_loss": 0.25})
    sink.log(2, {"actor/pg_loss": 0.125})
    sink.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("actor/pg_loss")] == [(1, 0.25), (2, 0.125)]


def test_a_run_folder_is_new_and_empty(tmp_path):
    made = create_run_folder(tmp_path / "outputs", "a", 0)
    assert made.is_new
    assert not list(made.path.iterdir())
    assert not create_run_folder(tmp_path / "outputs", "a", 0, go_on=True).is_new
    with pytest.raises(OutputError, match=r"^/.*/outputs/a exists already; .*trainer\.resume_mode=auto\.$"):
        create_run_folder(tmp_path / "outputs", "a", 0)


def test_a_folder_that_cannot_be_made_or_has_no_room_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"file/a.*trainer\.output_dir"):
        create_run_folder(tmp_path / "file", "a", 0)
    with pytest.raises(OutputError, match=r"less than trainer\.min_free_disk_mb=1000000000"):
        create_run_folder(tmp_path, "b", 10**9)
    assert not (tmp_path / "b").exists()


def test_a_read_only_file_system_is_named(tmp_path):
    with pytest.raises(OutputError, match="Read-only file system"), writing(tmp_path):
        raise OSError(errno.EROFS, "Read-only file system")


def test_folders_are_published_whole(tmp_path):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "x").write_text("1")
    publish_folder(tmp_path / "new", tmp_path / "final")
    assert (tmp_path / "final" / "x").read_text() == "1"
    assert not (tmp_path / "new").exists()


def test_the_curve_is_a_png(tmp_path):
    draw_curve(tmp_path / "c.png", {"accuracy": [(0, 0.3), (5, 0.9)]}, "t")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_the_step_line_keeps_its_columns():
    metrics = {
        "critic/score/mean": 0.5,
        "critic/acc/mean": 0.5,
        "response_length/mean": 4.0,
        "actor/ref_kl": 0.01,
        "timing_s/step": 0.6,
    }
    line = step_line(3, 30, metrics)
    assert line.startswith("step  3/30  reward  0.500  accuracy 0.500  length  4.00  kl  0.0100")
    assert "validation 0.750" in step_line(3, 30, {**metrics, "val-core/x/acc/mean@1": 0.75})
    assert "lag 2" in step_line(3, 30, {**metrics, "training/policy_lag": 2.0})
    assert validation_accuracy({"val-core/x/acc/mean@1": 0.5, "val-core/y/acc/mean@1": 1.0}) == 0.75
    assert validation_accuracy(metrics) is None


HOLDER = """
import sys
from pathlib import Path
from rl_app_ppo.outputs import (
    JSONLSink,
    TensorBoardSink,
    create_run_folder,
    draw_curve,
    occupied,
    publish_folder,
    writing,
)
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
    half = [tmp_path / ".checkpoint", tmp_path / "checkpoints" / ".saving-step-000004"]
    whole = [tmp_path / "checkpoint", tmp_path / "checkpoints" / "step-000002"]
    for folder in (*half, *whole):
        folder.mkdir(parents=True)
        (folder / "file").write_text("x")
    with pytest.raises(OutputError, match=r"Another run .* writes to .*trainer\.run_name"), occupied(tmp_path):
        pass
    assert all(folder.exists() for folder in half)
    first.kill()
    first.communicate()
    with occupied(tmp_path):
        assert [folder.exists() for folder in (*half, *whole)] == [False, False, True, True]
    with occupied(tmp_path):
        pass
