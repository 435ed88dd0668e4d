"""The length of a run: its steps, its passes over the data, or the smaller of the two."""

from __future__ import annotations

import json

import pytest

from rl_app_ppo.config.loading import load_config, to_yaml
from rl_app_ppo.inputs.epochs import with_length
from rl_protocol import ConfigError

DEMO = ("data.train_size=100", "data.train_batch_size=32")  # 3 whole batches


def steps(*overrides):
    return with_length(load_config([*DEMO, *overrides])).trainer.total_training_steps


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], 30),  # the default number of steps
        (["trainer.total_epochs=2"], 6),
        (["trainer.total_epochs=20"], 60),  # the default number of steps is no limit
        (["trainer.total_epochs=2", "trainer.total_training_steps=5"], 5),
        # as in verl, the run ends with its epochs
        (["trainer.total_epochs=2", "trainer.total_training_steps=7"], 6),
        (["trainer.total_epochs=2", "trainer.total_training_steps=-1"], 6),
        (["trainer.total_epochs=2", "trainer.total_training_steps=0"], 0),
    ],
)
def test_epochs_and_steps_are_both_limits(overrides, expected):
    assert steps(*overrides) == expected


def test_epochs_of_a_stronger_layer_replace_steps_of_a_weaker_one(tmp_path):
    """`--cfg` prints a number of steps; it does not limit total_epochs from the command line."""
    file = tmp_path / "my.yaml"
    file.write_text(to_yaml(load_config(list(DEMO))))
    assert with_length(load_config(["trainer.total_epochs=20"], file)).trainer.total_training_steps == 60
    file.write_text(to_yaml(load_config([*DEMO, "trainer.total_epochs=20"])))
    assert with_length(load_config([], file)).trainer.total_training_steps == 60
    assert with_length(load_config(["trainer.total_training_steps=5"], file)).trainer.total_training_steps == 5


def test_no_limit_at_all_is_refused():
    with pytest.raises(
        ConfigError, match=r"total_training_steps must be at least 0 without trainer\.total_epochs; got -1"
    ):
        load_config(["trainer.total_training_steps=-1"])
    with pytest.raises(ConfigError, match=r"trainer\.total_epochs must be at least 0; got -1"):
        load_config(["trainer.total_epochs=-1"])


def test_an_epoch_of_files_has_as_many_steps_as_whole_batches_of_usable_rows(tmp_path):
    row = {"data_source": "d", "prompt": [{"role": "user", "content": "1+2="}], "reward_model": {"ground_truth": "3"}}
    for name in ("train", "val"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(7)))
    files = [f"data.{name}_files={tmp_path}/{name}.jsonl" for name in ("train", "val")]
    common = [*files, f"model.cache_dir={tmp_path}/cache", "trainer.total_epochs=3"]
    small = [*common, "data.train_batch_size=3", "actor.ppo_mini_batch_size=3"]
    assert with_length(load_config(small)).trainer.total_training_steps == 6
    large = [*common, "data.train_batch_size=8", "actor.ppo_mini_batch_size=8"]
    with pytest.raises(
        ConfigError, match=r"train_batch_size must be at most 7, .* with trainer\.total_epochs=3; got 8"
    ):
        with_length(load_config(large))
