"""A run whose processes are all killed has its report, and `rl watch` says that it was killed."""

from __future__ import annotations

import contextlib
import time

import psutil
import pytest
from app_runs import marked, started
from typer.testing import CliRunner

from rl_app_ppo.cli import rl
from rl_app_ppo.report.run_data import RunData
from rl_app_ppo.watch.followed_run import QUIET_S


@pytest.mark.slow
def test_a_run_that_was_killed_whole_has_its_report(tmp_path, base_model, mark):
    folder = tmp_path / "run"
    run = started(
        mark,
        folder,
        f"model.path={base_model}",
        "trainer.total_training_steps=100000",
        "data.val_size=16",
        "data.train_batch_size=8",
        "actor.ppo_mini_batch_size=8",
        "rollout.num_workers=1",
        lines=6,
    )
    time.sleep(2.5)  # two blocks of the record
    for _ in range(3):  # processes that start in between
        for process in [process for process in marked(mark) if process.pid != run.pid]:
            with contextlib.suppress(psutil.Error):
                process.kill()
    run.kill()
    run.communicate(timeout=60)
    steps = len((folder / "metrics.jsonl").read_text().splitlines())

    data = RunData.read(folder)
    assert data.record.end is None
    assert {row.step for row in data.record.trajectories} >= set(range(1, 5))
    assert {span.stage for span in data.record.spans} >= {"build", "rollout", "reward", "update_actor"}
    done = CliRunner().invoke(rl.app, ["report", str(folder)])
    assert done.exit_code == 0, done.output
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert page.endswith("</html>\n")
    assert len(data.metrics) in (steps, steps - 1)  # the last line may be torn

    time.sleep(QUIET_S)
    watched = CliRunner().invoke(rl.app, ["watch", str(folder)])
    assert watched.exit_code == 1
    assert watched.output.splitlines()[-1].startswith("killed: ")
    assert "step      5/100000" in watched.output
