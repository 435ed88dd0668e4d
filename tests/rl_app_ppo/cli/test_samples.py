"""The table of `rl samples`."""

from __future__ import annotations

import msgspec
import pytest

from rl_app_ppo.cli.samples import read_samples, samples_text
from rl_protocol import ConfigError
from rl_trainer.rewards.scorer import Failure, Scored
from rl_trainer.workers.sample_log import SampleRow


def row(key, outcome):
    return SampleRow(key=key, data_source="d", prompt="p", response="r", ground_truth="g", outcome=outcome)


def test_the_parts_of_a_reward_have_columns():
    rows = [
        row("t1-0/0/0", Scored(numbers={"score": 0.75, "acc": 1.0, "math/score": 1.0, "form": -0.5})),
        row("t1-0/1/0", Scored(numbers={"score": 0.25, "acc": 0.0, "math/score": 0.0})),
        row("t1-0/2/0", Failure(kind="timeout", message="late")),
    ]
    assert [line.split() for line in samples_text(rows).splitlines()] == [
        ["key", "reward", "form", "math/score", "prompt", "response", "ground", "truth"],
        ["t1-0/0/0", "0.750", "-0.500", "1.000", "p", "r", "g"],
        ["t1-0/1/0", "0.250", "0.000", "p", "r", "g"],
        ["t1-0/2/0", "failed", "p", "r", "g"],
    ]
    assert samples_text(rows[2:]).splitlines()[0].split()[:3] == ["key", "reward", "prompt"]


@pytest.mark.parametrize("key", ["", "t1-0", "t1-x/0/0"])
def test_a_damaged_key_is_named(tmp_path, key):
    (tmp_path / "config.yaml").touch()
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "samples").mkdir()
    rows = [row("t1-0/0/0", Scored(numbers={"score": 1.0})), row(key, Scored(numbers={"score": 1.0}))]
    (tmp_path / "samples" / "1.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(rows))
    with pytest.raises(ConfigError, match=f"A sample has a damaged key: '{key}'"):
        read_samples(tmp_path, None, train=False, sort="key")


def test_samples_in_another_encoding_are_named(tmp_path):
    (tmp_path / "config.yaml").touch()
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "samples").mkdir()
    rows = msgspec.json.Encoder().encode_lines([row("t1-0/0/0", Scored(numbers={"score": 1.0}))])
    (tmp_path / "samples" / "1.jsonl").write_bytes(rows.replace(b'"p"', b'"\x99"'))
    with pytest.raises(ConfigError, match=r"The samples .*1\.jsonl can't be read"):
        read_samples(tmp_path, None, train=False, sort="key")
