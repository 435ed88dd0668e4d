"""Which checkpoint a replay starts from, what it compares, and what it refuses."""

from __future__ import annotations

import json

import pytest
from empty_checkpoints import save_checkpoints
from typer.testing import CliRunner

from rl_app_ppo.cli.replay import differences, replayed
from rl_app_ppo.cli.rl import app
from rl_app_ppo.config.loading import load_config, to_yaml
from rl_trainer.checkpoints.checkpoint_folder import newest_whole, step_name


@pytest.fixture
def checkpoints(tmp_path):
    """Those of the steps 2, 4 and 6; that of step 4 is damaged."""
    save_checkpoints(tmp_path, (2, 4, 6), to_yaml(load_config([])))
    (tmp_path / step_name(4) / "trainer.json").write_text("{")
    return tmp_path


@pytest.mark.parametrize(("step", "before"), [(1, None), (2, None), (3, 2), (5, 2), (6, 2), (7, 6)])
def test_a_replay_starts_from_the_newest_whole_checkpoint_before_the_step(checkpoints, step, before):
    found, _ = newest_whole(checkpoints, before=step)
    assert (found.manifest.step if found is not None else None) == before
    config = replayed(
        load_config(["trainer.save_freq=5", "transfer_queue.durability=commit"]), found, step, checkpoints
    )
    assert config.trainer.resume_mode == ("disable" if before is None else str(checkpoints / step_name(before)))
    assert (config.trainer.total_training_steps, config.trainer.save_freq) == (step, 0)
    assert config.transfer_queue.durability == "off"


def test_metrics_that_one_side_lacks_differ_and_times_do_not():
    one = {"actor/a": 1.0, "critic/b": 2.0, "timing_s/gen": 1.0, "perf/driver_bytes": 1.0}
    assert differences(one, {**one, "timing_s/gen": 2.0}) == []
    assert differences(one, {"actor/a": 1.0 + 2**-52}) == [
        ("actor/a", "1.0", "1.0000000000000002"),
        ("critic/b", "2.0", "None"),
    ]


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        (None, "is no run: "),
        ([0, 1, 2], "--step must be a trained step in "),
        ([0, 1, 2], "one of 1..2; got 9."),
        ([], "one of none; got 9."),
    ],
)
def test_a_folder_without_the_step_is_refused(tmp_path, metrics, words):
    if metrics is not None:
        (tmp_path / "config.yaml").write_text(to_yaml(load_config([])))
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in metrics))
    done = CliRunner().invoke(app, ["replay", str(tmp_path), "--step", "9"])
    assert done.exit_code == 2
    assert words in done.stderr
