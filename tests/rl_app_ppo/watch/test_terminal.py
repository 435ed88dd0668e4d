"""`rl watch` follows a run that grows, and knows when it was killed."""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import time
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from rl_app_ppo.cli import rl
from rl_app_ppo.outputs.metrics_file import kept_metrics, more_metrics
from rl_app_ppo.watch import followed_run
from rl_app_ppo.watch.followed_run import FollowedRun
from rl_app_ppo.watch.terminal import watch
from rl_protocol import ConfigError
from rl_trainer.record.record_file import RecordFile
from rl_trainer.record.record_rows import AlarmRow, CallRow, EndRow, SpanRow, StartRow, StepRow


class Run:
    """A run folder that grows by calls; it is locked while the run goes on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "config.yaml").write_text("{}\n")
        self.lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self.lock, fcntl.LOCK_EX)

    def record(self, *rows):
        file = RecordFile(self.folder / "record", "driver")
        file.append(rows)
        file.close()

    def step(self, step):
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "critic/score/mean": step / 4}) + "\n")
        self.record(StepRow(at=time.time(), step=step))

    def unlock(self):
        if self.lock >= 0:
            os.close(self.lock)
        self.lock = -1


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path / "run")
    run.record(StartRow(at=time.time() - 60, steps=2))
    yield run
    run.unlock()


def follow(run, events, *, terminal=False, width=100):
    """What watch prints while an event happens at each of its waits, and its result."""
    out = Console(file=io.StringIO(), force_terminal=terminal, width=width)
    left = iter(events)
    finished = watch(run.folder, out, lambda _: next(left)())
    assert next(left, None) is None
    return out.file.getvalue(), finished


def test_new_steps_and_warnings_are_lines_until_the_end(run):
    now = time.time()
    events = [
        lambda: run.step(1),
        lambda: run.record(AlarmRow(at=now, name="gap", text="the gap grows")),
        lambda: run.step(2),
        lambda: run.record(EndRow(at=now + 60, outcome="finished", text="")),
    ]
    text, finished = follow(run, events)
    assert finished
    lines = text.splitlines()
    assert [line[:10] for line in lines] == ["step 1/2  ", "warning: t", "step 2/2  ", "finished"]


def test_a_panel_shows_curve_and_workers_and_fits_the_terminal(run):
    now = time.time()
    run.step(1)
    run.step(2)
    run.record(
        CallRow(at=now - 3, worker="actor", stage="update_actor"),
        CallRow(at=now - 9, worker="reward", stage="reward"),
        SpanRow(at=now - 8, worker="reward", stage="reward", began=now - 9),
    )
    text, finished = follow(
        run, [lambda: run.record(EndRow(at=now + 60, outcome="failed", text="no luck"))], terminal=True
    )
    assert not finished
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert re.search(r"actor .*busy  update_actor for 0:0[3-9]", shown)
    assert re.search(r"reward .*busy  waits for 0:\d\d after reward", shown)
    assert "mean score" in shown
    assert "failed no luck" in shown
    assert max(map(len, shown.splitlines())) <= 100


def test_a_panel_of_a_score_that_is_not_finite_has_no_curve(run):
    line = '{"step": 1, "critic/score/mean": NaN}\n'
    (run.folder / "metrics.jsonl").write_text(line)
    run.record(EndRow(at=time.time() + 60, outcome="finished", text=""))
    text, finished = follow(run, [], terminal=True)
    assert finished
    assert "mean score" not in text


def test_a_killed_run_ends_the_watch_but_a_quiet_one_does_not(run):
    run.step(1)
    follower, now = FollowedRun(run.folder), time.time()
    assert not follower.read(now + 3600).over  # an hour without a row, but locked
    run.unlock()
    assert not follower.read(now).over  # free, but it has just written
    assert follower.read(now + 3600).killed
    assert follower.read(now - 3600).killed  # the clock was set back


def test_a_resumed_run_is_followed_again(run):
    follower, now = FollowedRun(run.folder), time.time()
    run.record(CallRow(at=now, worker="actor", stage="rollout"), EndRow(at=now + 1, outcome="failed", text=""))
    assert follower.read(now).over
    run.record(StartRow(at=now + 2, after=1, steps=2))
    seen = follower.read(now)
    assert not seen.over
    assert seen.record.calls == []


def test_a_follower_reads_what_was_appended_and_keeps_the_metrics_of_curves(run, monkeypatch):
    def written(*steps, mode="a"):
        lines = [{"step": step, "critic/score/mean": 0.5, "val-core/x/acc/mean@1": 1.0, "grad": 2.0} for step in steps]
        with (run.folder / "metrics.jsonl").open(mode) as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))

    begins = []
    monkeypatch.setattr(
        followed_run, "more_metrics", lambda path, begin: begins.append(begin) or more_metrics(path, begin)
    )
    follower, now = FollowedRun(run.folder), time.time()
    written(0, 1)
    assert [len(line) for line in follower.read(now).metrics] == [4, 4]
    read = (run.folder / "metrics.jsonl").stat().st_size
    assert [len(line) for line in follower.read(now).metrics] == [3, 4]
    written(2, 3)
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4')  # half of a line
    assert [(line["step"], len(line)) for line in follower.read(now).metrics] == [(0, 3), (1, 3), (2, 4), (3, 4)]
    assert begins == [0, read, read]
    kept_metrics(run.folder / "metrics.jsonl", 1)  # a resumed run repeats the steps after it
    written(2)
    assert [line["step"] for line in follower.read(now).metrics] == [0, 1, 2]


def test_a_follower_keeps_recent_spans_and_the_last_of_each_worker(run):
    now = time.time()
    follower = FollowedRun(run.folder)
    for at in (now - 500, now - 400, now - 30, now):
        run.record(SpanRow(at=at, worker="actor", stage="update_actor", began=at - 1))
    run.record(*(SpanRow(at=now - ago, worker="reward", stage="reward", began=now - ago) for ago in (300, 200)))
    assert [(span.worker, round(now - span.at)) for span in follower.read(now).record.spans] == [
        ("reward", 200),
        ("actor", 30),
        ("actor", 0),
    ]


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is no folder of a run"):
        FollowedRun(tmp_path)
    assert CliRunner().invoke(rl.app, ["watch", str(tmp_path)]).exit_code == 2


def test_the_exit_code_is_that_of_the_run(run):
    run.record(EndRow(at=time.time() + 1, outcome="interrupted", text=""))
    done = CliRunner().invoke(rl.app, ["watch", str(run.folder)])
    assert (done.exit_code, done.output) == (1, "interrupted\n")
