"""What `rl replay` refuses, and what it prints of a batch."""

from __future__ import annotations

import json

import pytest
from kept_runs import keep_run
from typer.testing import CliRunner

from rl_app_ppo.cli.rl import app
from rl_app_ppo.config.loading import load_config, to_yaml


def replay(*words):
    return CliRunner().invoke(app, ["replay", *map(str, words)])


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        (None, "is no folder of a run"),
        ([0, 1, 2], "--step must be a trained step in "),
        ([0, 1, 2], "one of 1..2; got 9."),
        ([], "metrics.jsonl, which has none yet; got 9."),
    ],
)
def test_a_folder_without_the_step_is_refused(tmp_path, metrics, words):
    if metrics is not None:
        (tmp_path / "config.yaml").write_text(to_yaml(load_config([])))
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in metrics))
    done = replay(tmp_path, "--step", 9)
    assert done.exit_code == 2
    assert words in done.stderr


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (b"", "expected a mapping"),
        (b"\xff", "can't be read"),
        (b"rollout: {n: 4", "can't be read"),
        (b"rollout: {no_key: 4}", "Unknown key 'rollout.no_key' in "),
        (b"rollout:", "rollout in "),
    ],
)
def test_a_configuration_that_is_damaged_or_of_another_version_is_refused(tmp_path, config, words):
    (tmp_path / "config.yaml").write_bytes(config)
    done = replay(tmp_path, "--step", 1)
    assert done.exit_code == 2
    assert words in done.stderr
    assert "config.yaml" in done.stderr


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ((), "lacks the batches of the steps 1, 2"),
        ((), "Set trainer.keep_batches=-1, or at least to trainer.save_freq"),
        (("--row", "0"), "set trainer.keep_batches=-1"),
        (("--field", "scores"), "set trainer.keep_batches=-1"),
        (("--against", "other"), "set trainer.keep_batches=-1 in both runs"),
    ],
)
def test_without_kept_batches_the_key_to_set_is_named(tmp_path, more, words):
    for name in ("run", "other"):
        keep_run(tmp_path / name, {})
    more = tuple(str(tmp_path / "other") if word == "other" else word for word in more)
    done = replay(tmp_path / "run", "--step", 2, *more)
    assert done.exit_code == 2
    assert words in done.stderr


def test_a_row_is_printed_by_its_key_or_its_number(tmp_path):
    keep_run(tmp_path, {1: [0.5, -0.5], 2: [1.0, -1.0]})
    found = [replay(tmp_path, "--step", 2, "--row", row, "--field", "advantages") for row in ("s2-0/1/0", "1")]
    assert [one.exit_code for one in found] == [0, 0]
    assert {one.stdout for one in found} == {"s2-0/1/0  [-1.0, -1.0]\n"}
    (whole,) = json.loads(replay(tmp_path, "--step", 2, "--row", "0", "--json").stdout).values()
    assert whole["advantages"] == [1.0, 1.0]
    assert whole["prompts"] == [7, 8]
    every = json.loads(replay(tmp_path, "--step", 1, "--field", "scores", "--json").stdout)
    assert every == {"s1-0/0/0": {"scores": 0.5}, "s1-0/1/0": {"scores": -0.5}}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--row", "2"), "--row must be a row of step 1, one of s1-0/0/0..s1-0/1/0, or a number from 0 to 1; got '2'."),
        (("--row", "s2-0/0/0"), "got 's2-0/0/0'."),
        (("--row", "0", "--field", "score"), "--field must be a field of the batch, of prompts, "),
    ],
)
def test_another_row_or_field_is_refused(tmp_path, more, words):
    keep_run(tmp_path, {1: [0.5, -0.5]})
    done = replay(tmp_path, "--step", 1, *more)
    assert done.exit_code == 2
    assert words in done.stderr


def test_the_first_difference_from_another_run_is_named(tmp_path):
    """In step 2: those of step 3, of the metrics and of the weights follow from it."""
    keep_run(tmp_path / "one", {1: [0.5, -0.5], 2: [1.0, -1.0], 3: [0.0, 0.0]})
    keep_run(tmp_path / "two", {1: [0.5, -0.5], 2: [1.0, -0.75], 3: [2.0, 0.0]})
    done = replay(tmp_path / "one", "--step", 3, "--against", tmp_path / "two")
    assert done.exit_code == 1
    assert "step 2: scores of row s2-0/1/0: -1.0, and -0.75" in done.stdout
    assert "step 3" not in done.stdout
    done = replay(tmp_path / "one", "--step", 3, "--against", tmp_path / "two", "--json")
    (difference,) = json.loads(done.stdout)["differences"]
    assert (difference["name"], difference["row"], difference["run"]) == ("scores", "s2-0/1/0", "-1.0")
    same = replay(tmp_path / "one", "--step", 1, "--against", tmp_path / "two")
    assert same.exit_code == 0
    assert "parameters and optimizer: equal" in same.stdout
